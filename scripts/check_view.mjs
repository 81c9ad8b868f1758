// The page of `vramalloc view` in a headless Chromium: node check_view.mjs CHROMIUM FOLDER. FOLDER has what
// scripts/check-view.sh made: big.html with big.json, and the other pages; screenshots come into it.
// What the page says is compared with what follows here from the snapshot's events alone.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { Browser } from "./browser.mjs";

const [chromium, folder] = process.argv.slice(2);
const LIMIT_MS = 1000;
let passed = 0;

async function check(name, body) {
  const said = await body();
  passed++;
  console.log(`ok: ${name}${said ? `: ${said}` : ""}`);
}

/** The allocations of the first device's events, by birth. Times are event numbers from 1. */
function allocationsOf(path) {
  const [entries] = JSON.parse(readFileSync(path, "utf8")).device_traces, open = new Map(), all = [];
  entries.forEach(({ action, addr, size, block_size }, at) => {
    if (action === "alloc") {
      open.set(addr, all.length);
      all.push({ address: addr, requested: size, bytes: block_size, born: at + 1, freed: Infinity });
    } else if (action === "free_requested") {
      all[open.get(addr)].freed = at + 1;
    }
  });
  return { all, events: entries.length };
}

const liveAt = ({ all }, moment) => all.filter(({ born, freed }) => born <= moment && freed > moment);
const sum = (list) => list.reduce((total, { bytes }) => total + bytes, 0);

function peakOf({ all, events }) {
  const change = new Float64Array(events + 2);
  for (const { bytes, born, freed } of all) {
    change[born] += bytes;
    if (freed <= events) change[freed] -= bytes;
  }
  let now = 0, peak = { bytes: 0, moment: 0 };
  for (let moment = 1; moment <= events; moment++) {
    now += change[moment];
    if (now > peak.bytes) peak = { bytes: now, moment };
  }
  return peak;
}

const number = (text) => Number(/^[\d,]+/.exec(text.replace(/^event /, ""))?.[0].replaceAll(",", ""));

/** The tooltip as name and value, or null. */
const TIP = `(() => {
  const tip = document.getElementById("tip");
  if (tip.hidden) return null;
  const facts = Object.fromEntries([...tip.querySelectorAll("dt")].map((dt) => [dt.textContent, dt.nextSibling.textContent]));
  return { facts, moment: Number(tip.dataset.moment), title: tip.querySelector("strong")?.textContent ?? "" };
})()`;

const tookMs = (tab, what) => tab.evaluate(`performance.getEntriesByName("vramalloc:${what}").at(-1)?.duration`);
const boxOf = (tab, id) => tab.evaluate(`(() => { const { x, y, width, height } = document.getElementById("${id}").querySelector(".over").getBoundingClientRect(); return { x, y, width, height, ...document.getElementById("${id}").dataset }; })()`);

async function openPage(browser, name, theme) {
  const tab = await browser.tab(theme), url = pathToFileURL(resolve(folder, name)).href;
  await tab.goto(url);
  await tab.until("document.documentElement?.dataset.open === 'yes'");
  tab.url = url;
  tab.opened = await tookMs(tab, "open");
  return tab;
}

/** Moves the pointer, and waits for the answer: [what the tooltip says, ms]. */
async function hover(tab, x, y) {
  await tab.evaluate("performance.clearMeasures('vramalloc:hover')");
  const start = performance.now();
  await tab.move(x, y);
  await tab.until("performance.getEntriesByName('vramalloc:hover').length > 0", 10);
  // From the pointer's event to the answer, and as it is seen from outside, with the way there and back.
  return [await tab.evaluate(TIP), await tookMs(tab, "hover"), performance.now() - start];
}

async function set(tab, id, value, event) {
  await tab.evaluate(`(() => { const e = document.getElementById("${id}"); e.value = ${JSON.stringify(value)}; e.dispatchEvent(new Event("${event}", { bubbles: true })); })()`);
  await tab.evaluate("new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 200))");
}

const textOf = (tab, selector) => tab.evaluate(`document.querySelector(${JSON.stringify(selector)}).textContent`);

function assertQuiet(tab) {
  assert.deepEqual(tab.problems, [], "the console says nothing");
  const elsewhere = tab.requests.filter((url) => url !== tab.url && !url.startsWith("data:"));
  assert.deepEqual(elsewhere, [], "nothing is asked of a network");
}

function assertIs(facts, { address, bytes, requested, born, freed }) {
  assert.equal(facts.address, `0x${BigInt(address).toString(16)}`);
  assert.equal(number(facts.block), bytes);
  assert.equal(number(facts.requested), requested);
  assert.equal(number(facts.allocated), born);
  if (freed === Infinity) assert.match(facts.freed, /^never/); else assert.equal(number(facts.freed), freed);
}

async function hovers(tab, model, places) {
  const box = await boxOf(tab, "memory"), perPixel = Number(box.most) / Number(box.height);
  let slowest = 0, allocations = 0;
  for (const [across, up] of places) {
    const x = Math.floor(box.x + across * box.width), y = Math.floor(box.y + (1 - up) * box.height);
    const [tip, inside, outside] = await hover(tab, x, y);
    slowest = Math.max(slowest, inside, outside);
    const low = (Number(box.height) - 1 - Math.floor(y - box.y)) * perPixel, live = liveAt(model, tip.moment);
    if (!tip.facts.address) {
      assert.ok(low + perPixel >= sum(live), `nothing is shown at ${across}, ${up}, where ${sum(live)} bytes are`);
      assert.equal(number(/\(([\d,]+) bytes\)/.exec(tip.facts.allocated)[1]), sum(live));
      continue;
    }
    const address = Number(tip.facts.address), at = live.findIndex((one) => one.address === address);
    assert.ok(at >= 0, `${tip.facts.address} is live at event ${tip.moment}`);
    assertIs(tip.facts, live[at]);
    const below = sum(live.slice(0, at));
    assert.ok(below <= low + 1.5 * perPixel && below + live[at].bytes >= low - 0.5 * perPixel, "it is where the pointer is");
    allocations++;
  }
  assert.ok(slowest < LIMIT_MS, `a hover took ${slowest} ms`);
  return [slowest, allocations];
}

const ACROSS = [0.003, 0.02, 0.11, 0.27, 0.42, 0.58, 0.73, 0.85, 0.97], UP = [0.03, 0.3, 0.55, 0.68, 0.95];
const PLACES = ACROSS.flatMap((x) => UP.map((y) => [x, y]));

async function big(browser) {
  const model = allocationsOf(`${folder}/big.json`), peak = peakOf(model);
  for (const theme of ["light", "dark"]) {
    const tabs = [];
    for (let k = 0; k < 3; k++) tabs.push(await openPage(browser, "big.html", theme));
    const opened = tabs.map((one) => one.opened), median = opened.toSorted((a, b) => a - b)[1], tab = tabs.pop();
    for (const one of tabs) await one.close();
    await check(`${theme}: opens within ${LIMIT_MS} ms`, () => {
      const said = `${opened.map((ms) => ms.toFixed(0)).join(", ")} ms, ${model.events} events`;
      assert.ok(median < LIMIT_MS, said);
      return said;
    });
    await check(`${theme}: the peak is that of the events`, async () => {
      assert.match(await textOf(tab, "#when"), new RegExp(`^event ${peak.moment.toLocaleString("en-US")} `));
      const ground = await tab.evaluate("getComputedStyle(document.body).backgroundColor");
      assert.equal(Number(/\d+/.exec(ground)[0]) > 128, theme === "light", `${theme} has the ground ${ground}`);
    });
    await check(`${theme}: hovers name the right allocation within ${LIMIT_MS} ms`, async () => {
      const [slowest, allocations] = await hovers(tab, model, PLACES);
      assert.ok(allocations >= PLACES.length / 2, `${allocations} places had an allocation`);
      return `${allocations} allocations at ${PLACES.length} places, slowest ${slowest.toFixed(1)} ms`;
    });
    await tab.screenshot(`${folder}/big-${theme}.png`);
    await check(`${theme}: zoomed in on the peak, too`, async () => {
      await tab.evaluate("document.getElementById('zoom').click()");
      await tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))");
      const [slowest, allocations] = await hovers(tab, model, PLACES);
      return `${allocations} allocations, slowest ${slowest.toFixed(1)} ms`;
    });
    await tab.screenshot(`${folder}/big-${theme}-peak.png`);
    assertQuiet(tab);
    await tab.close();
  }

  const tab = await openPage(browser, "big.html", "light");
  await check("the map shows what is live at the moment of the slider", async () => {
    let seen = 0;
    for (const moment of [peak.moment, Math.floor(model.events / 2), model.events - 400]) {
      await set(tab, "moment", String(moment), "input");
      const live = liveAt(model, moment), box = await boxOf(tab, "map");
      assert.match(await textOf(tab, "#when"), new RegExp(`^event ${moment.toLocaleString("en-US")} `));
      for (let k = 0; k < 24; k++) {
        const [tip, ms] = await hover(tab, box.x + box.width * ((k * 0.37 + 0.05) % 1), box.y + box.height * ((k * 0.11 + 0.03) % 0.9));
        assert.ok(ms < LIMIT_MS);
        if (!tip?.facts.address) continue;
        const one = live.find(({ address }) => address === Number(tip.facts.address));
        // Queued work may hold it still.
        if (one) assertIs(tip.facts, one); else assert.ok(number(tip.facts.freed) <= moment && number(tip.facts.cached) > moment);
        seen++;
      }
    }
    assert.ok(seen > 20, `${seen} blocks were seen`);
    return `${seen} blocks`;
  });
  await check("the rows are what held the memory", async () => {
    await set(tab, "moment", String(peak.moment), "input");
    const sizes = new Map();
    for (const { bytes } of liveAt(model, peak.moment)) sizes.set(bytes, (sizes.get(bytes) ?? 0) + bytes);
    const most = Math.max(...sizes.values()), first = await textOf(tab, "#holders .row .part");
    assert.match(first, new RegExp(`^${(100 * most / peak.bytes).toFixed(1)} %`));
    const share = [...sizes].find(([, bytes]) => bytes === most);
    assert.ok(first.includes(`${most / share[0]} blocks`), first);
  });
  await check("the search finds by address, by size and by range", async () => {
    const some = model.all[Math.floor(model.all.length / 3)];
    const within = (is) => model.all.filter(is).length;
    const sizes = ({ bytes, requested }, low, high) => (bytes >= low && bytes <= high) || (requested >= low && requested <= high);
    let slowest = 0;
    for (const [query, count] of [
      [`0x${some.address.toString(16)}`, within(({ address, bytes }) => address <= some.address && some.address < address + bytes)],
      [`=${some.bytes}`, within((one) => sizes(one, some.bytes, some.bytes))],
      [">=16MiB", within((one) => sizes(one, 16 << 20, Infinity))],
      ["1MiB..2MiB", within((one) => sizes(one, 1 << 20, 2 << 20))],
      ["there is no such text", 0],
    ]) {
      await set(tab, "search", query, "input");
      await tab.until("performance.getEntriesByName('vramalloc:search').length > 0", 10);
      assert.equal(number((await textOf(tab, "#found h2")).replace("Found ", "")), count, query);
      slowest = Math.max(slowest, await tookMs(tab, "search"));
    }
    assert.ok(slowest < LIMIT_MS, `a search took ${slowest} ms`);
    await set(tab, "search", ">=16MiB", "input");
    await tab.screenshot(`${folder}/big-search.png`);
    await set(tab, "search", "", "input");
    return `slowest ${slowest.toFixed(0)} ms`;
  });
  await check("every way to stack draws and answers", async () => {
    const said = [];
    for (const by of ["tag", "stack", "size", "stream", "allocation"]) {
      await set(tab, "by", by, "change");
      const box = await boxOf(tab, "memory"), [tip, ms] = await hover(tab, box.x + box.width * 0.6, box.y + box.height * 0.9);
      assert.ok(tip.title && ms < LIMIT_MS);
      said.push(`${by} ${ms.toFixed(0)} ms`);
    }
    return said.join(", ");
  });
  await check("wheel, drag and click zoom, move and choose the moment", async () => {
    const before = await boxOf(tab, "memory"), at = [before.x + before.width / 2, before.y + before.height / 2];
    const settled = () => tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))");
    await tab.send("Input.dispatchMouseEvent", { type: "mouseWheel", x: at[0], y: at[1], deltaX: 0, deltaY: -600 });
    await tab.until(`Number(document.getElementById("memory").dataset.from) > ${before.from}`, 10);
    const zoomed = await boxOf(tab, "memory");
    assert.ok(zoomed.to - zoomed.from < 0.6 * (before.to - before.from), "a wheel zooms in");
    await tab.drag(at, [at[0] + 200, at[1]]);
    await settled();
    const moved = await boxOf(tab, "memory"), by = (zoomed.to - zoomed.from) * 200 / zoomed.width;
    assert.ok(Math.abs(zoomed.from - moved.from - by) < 1, "a drag moves");
    const [tip] = await hover(tab, ...at);
    await tab.click(...at);
    await settled();
    assert.match(await textOf(tab, "#when"), new RegExp(`^event ${tip.moment.toLocaleString("en-US")} `), "a click is that moment");
    assert.ok((await textOf(tab, "#detail dl")).includes(tip.facts.address), "and keeps the details");
    await tab.evaluate("document.getElementById('fit').click()");
    await settled();
    assert.equal((await boxOf(tab, "memory")).to, before.to);
  });
  await check("a click on the map shows that segment alone", async () => {
    const box = await boxOf(tab, "map"), at = [box.x + box.width * 0.2, box.y + 12], [{ facts: { address } }] = await hover(tab, ...at);
    await tab.click(...at);
    await tab.until("!document.getElementById('all-segments').hidden", 10);
    await tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))");
    const [there] = await hover(tab, box.x + 5, box.y + 12), [end] = await hover(tab, box.x + box.width - 8, box.y + 12 + 11 * 20);
    assert.ok(there.facts.address && end?.title, "it fills the map");
    assert.equal(there.facts.address, address, "and begins with the block that was clicked");
    await tab.evaluate("document.getElementById('all-segments').click()");
  });
  await check("the button changes the theme", async () => {
    await tab.evaluate("document.getElementById('theme').click()");
    assert.equal(await tab.evaluate("document.documentElement.dataset.theme"), "dark");
  });
  assertQuiet(tab);
  await tab.close();
}

async function long(browser) {
  const tab = await openPage(browser, "long.html", "light"), box = await boxOf(tab, "memory");
  await check("a million allocations and frees stay fast", async () => {
    const events = await tab.evaluate("Number(document.getElementById('moment').max)");
    assert.ok(events >= 1_000_000);
    let slowest = 0;
    for (const [x, y] of PLACES.slice(0, 12)) slowest = Math.max(slowest, (await hover(tab, box.x + x * box.width, box.y + (1 - y) * box.height))[2]);
    const start = performance.now();
    await set(tab, "moment", String(events >> 1), "input");
    const moved = performance.now() - start;
    assert.ok(tab.opened < 3 * LIMIT_MS && slowest < LIMIT_MS && moved < LIMIT_MS, `${tab.opened}, ${slowest}, ${moved} ms`);
    return `${events} events open in ${tab.opened.toFixed(0)} ms, hover ${slowest.toFixed(0)} ms, another moment ${moved.toFixed(0)} ms`;
  });
  await tab.screenshot(`${folder}/long.png`);
  assertQuiet(tab);
  await tab.close();
}

async function stacks(browser) {
  for (const theme of ["light", "dark"]) {
    const tab = await openPage(browser, "mlp.html", theme);
    await check(`${theme}: PyTorch's stacks are shown and found`, async () => {
      assert.match(await textOf(tab, "#holders .rows"), /_init_group optim\/adam\.py:178 ← mlp .*train\.py:15/);
      await set(tab, "search", "adam.py", "input");
      assert.ok(number((await textOf(tab, "#found h2")).replace("Found ", "")) > 0);
      await set(tab, "search", "", "input");
      const box = await boxOf(tab, "memory");
      await hover(tab, box.x + box.width * 0.7, box.y + box.height * 0.9);
      assert.ok(await tab.evaluate("document.querySelectorAll('#tip ol.stack li').length > 0"));
    });
    await tab.screenshot(`${folder}/mlp-${theme}.png`);
    assertQuiet(tab);
    await tab.close();
  }
}

async function hostile(browser) {
  const tab = await openPage(browser, "hostile.html", "light");
  await check("what a hostile file has for names is text", async () => {
    for (const by of ["tag", "stack", "size", "stream", "allocation"]) {
      await set(tab, "by", by, "change");
      const box = await boxOf(tab, "memory");
      for (const up of [0.1, 0.3, 0.5, 0.7, 0.9]) await hover(tab, box.x + box.width * 0.5, box.y + box.height * up);
      await tab.click(box.x + box.width * 0.5, box.y + box.height * 0.9);
      await tab.evaluate("document.querySelectorAll('#holders .row').forEach((row) => row.click())");
    }
    await set(tab, "search", "<img", "input");
    assert.ok(number((await textOf(tab, "#found h2")).replace("Found ", "")) > 0, "and it can be searched for");
    await set(tab, "by", "stack", "change");
    assert.match(await textOf(tab, "#holders .rows"), /<\/script><img src=x onerror=/);
    assert.match(await textOf(tab, "#title"), /<img/);
    assert.equal(await tab.evaluate("document.querySelectorAll('img, svg, iframe, object, script:not([nonce])').length"), 0);
    assert.equal(await tab.evaluate("typeof window.ran"), "undefined");
  });
  await tab.screenshot(`${folder}/hostile.png`);
  assertQuiet(tab);
  await tab.close();
}

async function bare(browser) {
  for (const [name, says] of [["live.html", /^Peak 3\.00 MiB allocated; 4\.00 MiB reserved at most/], ["empty.html", /neither events nor segments/]]) {
    const tab = await openPage(browser, name, "light");
    await check(`${name}: a snapshot without a history opens`, async () => {
      assert.match(await textOf(tab, "#headline"), says);
      if (name === "live.html") assert.match(await textOf(tab, "#holders .row .bytes"), /^3\.00 MiB$/);
    });
    await tab.screenshot(`${folder}/${name}.png`);
    assertQuiet(tab);
    await tab.close();
  }
}

const browser = await Browser.start(chromium);
try {
  await big(browser);
  await long(browser);
  await stacks(browser);
  await hostile(browser);
  await bare(browser);
  console.log(`${passed} passed, 0 failed`);
} finally {
  await browser.stop();
}
