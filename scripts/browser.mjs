// A headless Chromium, driven through its debugging pipe: no package is needed.

import { spawn } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

export class Browser {
  static async start(program, { width = 1400, height = 960 } = {}) {
    const browser = new Browser();
    browser.profile = mkdtempSync(join(tmpdir(), "check-view-"));
    browser.size = { width, height };
    const args = [
      "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-extensions",
      "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
      `--user-data-dir=${browser.profile}`, ...(process.getuid?.() === 0 ? ["--no-sandbox"] : []), "about:blank",
    ];
    browser.process = spawn(program, args, { stdio: ["ignore", "ignore", "pipe", "pipe", "pipe"] });
    browser.process.stderr.resume();
    browser.ended = new Promise((resolve) => browser.process.once("exit", resolve));
    browser.ended.then((code) => browser.waiting.forEach(({ reject }) => reject(new Error(`Chromium ended (${code})`))));
    browser.#listen();
    return browser;
  }

  waiting = new Map();
  listeners = [];
  #next = 1;

  #listen() {
    let rest = Buffer.alloc(0);
    this.process.stdio[4].on("data", (chunk) => {
      rest = Buffer.concat([rest, chunk]);
      for (let end = rest.indexOf(0); end >= 0; end = rest.indexOf(0)) {
        const message = JSON.parse(rest.subarray(0, end).toString());
        rest = rest.subarray(end + 1);
        const waiting = this.waiting.get(message.id);
        this.waiting.delete(message.id);
        if (message.error) waiting?.reject(new Error(JSON.stringify(message.error)));
        else if (waiting) waiting.resolve(message.result);
        else this.listeners.forEach((listener) => listener(message));
      }
    });
  }

  send(method, params = {}, sessionId = undefined) {
    const id = this.#next++;
    this.process.stdio[3].write(`${JSON.stringify({ id, method, params, sessionId })}\0`);
    return new Promise((resolve, reject) => this.waiting.set(id, { resolve, reject }));
  }

  /** A new tab; what it asks of the network and what goes wrong in it are kept. */
  async tab(theme) {
    const { targetId } = await this.send("Target.createTarget", { url: "about:blank" });
    const { sessionId } = await this.send("Target.attachToTarget", { targetId, flatten: true });
    const tab = new Tab(this, sessionId, targetId);
    this.listeners.push((message) => message.sessionId === sessionId && tab.hear(message));
    for (const domain of ["Page", "Runtime", "Log", "Network"]) await tab.send(`${domain}.enable`);
    await tab.send("Emulation.setDeviceMetricsOverride", { ...this.size, deviceScaleFactor: 1, mobile: false });
    await tab.theme(theme);
    return tab;
  }

  async stop() {
    await this.send("Browser.close").catch(() => {});
    await this.ended;
    rmSync(this.profile, { recursive: true, force: true, maxRetries: 5, retryDelay: 200 });
  }
}

class Tab {
  problems = [];
  requests = [];

  constructor(browser, session, target) { Object.assign(this, { browser, session, target }); }

  send(method, params) { return this.browser.send(method, params, this.session); }

  hear({ method, params }) {
    if (method === "Runtime.exceptionThrown") this.problems.push(params.exceptionDetails.exception?.description ?? params.exceptionDetails.text);
    if (method === "Runtime.consoleAPICalled" && ["error", "warning"].includes(params.type)) this.problems.push(params.args.map((arg) => arg.value ?? arg.description).join(" "));
    if (method === "Log.entryAdded" && params.entry.level !== "info") this.problems.push(params.entry.text);
    if (method === "Network.requestWillBeSent") this.requests.push(params.request.url);
    if (method === "Page.javascriptDialogOpening") this.problems.push(`a dialog: ${params.message}`);
  }

  theme(theme) { return this.send("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: theme }] }); }

  goto(url) { return this.send("Page.navigate", { url }); }

  async evaluate(expression) {
    const { result, exceptionDetails } = await this.send("Runtime.evaluate", { expression, returnByValue: true, awaitPromise: true });
    if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
    return result.value;
  }

  /** Waits until an expression is true. */
  async until(expression, seconds = 60) {
    for (const end = Date.now() + seconds * 1000; ;) {
      if (await this.evaluate(expression)) return;
      if (Date.now() > end) throw new Error(`not within ${seconds} s: ${expression}; the page says: ${this.problems.join("; ")}`);
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
  }

  async move(x, y) { await this.send("Input.dispatchMouseEvent", { type: "mouseMoved", x, y }); }

  async click(x, y) {
    for (const type of ["mousePressed", "mouseReleased"]) {
      await this.send("Input.dispatchMouseEvent", { type, x, y, button: "left", clickCount: 1 });
    }
  }

  async drag([fromX, fromY], [toX, toY]) {
    const mouse = (type, x, y) => this.send("Input.dispatchMouseEvent", { type, x, y, button: "left", buttons: 1, clickCount: 1 });
    await mouse("mousePressed", fromX, fromY);
    for (let k = 1; k <= 4; k++) await mouse("mouseMoved", fromX + (toX - fromX) * k / 4, fromY + (toY - fromY) * k / 4);
    await mouse("mouseReleased", toX, toY);
  }

  async screenshot(path) {
    const { data } = await this.send("Page.captureScreenshot", { format: "png" });
    writeFileSync(path, Buffer.from(data, "base64"));
  }

  close() { return this.browser.send("Target.closeTarget", { targetId: this.target }); }
}
