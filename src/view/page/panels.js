// What is said in words. Texts of the file are only ever set as text.

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);

function facts(pairs) {
  const list = element("dl");
  for (const [name, value] of pairs) if (value) list.append(element("dt", { textContent: name }), element("dd", { textContent: value }));
  return list;
}

function stackOf(device, stack, most = Infinity) {
  const frames = device.frames(stack);
  if (!frames.length) return [];
  const list = element("ol", { className: "stack" });
  for (const { name, file, line } of frames.slice(0, most)) {
    list.append(element("li", {}, element("span", { textContent: `${name || "?"} ` }), element("span", { className: "file", textContent: `${file}${line ? `:${line}` : ""}` })));
  }
  if (frames.length > most) list.append(element("li", { className: "file", textContent: `… ${frames.length - most} more (click for all)` }));
  return [list];
}

function moment(device, at, atStart, atEnd) {
  if (at === 0) return atStart;
  if (at === NEVER) return atEnd;
  return `event ${exact(at)} · ${clock(device.time(at))}`;
}

/** All about an allocation. */
function allocationFacts(device, i, most) {
  const end = device.freed[i] === NEVER ? device.events : device.freed[i];
  const lived = device.events ? device.time(end) - device.time(device.born[i]) : 0;
  const more = device.freed[i] === NEVER ? "more than " : "";
  return [
    element("strong", { textContent: `${human(device.bytes[i])}` }),
    facts([
      ["block", `${exact(device.bytes[i])} bytes`],
      ["requested", `${exact(device.requested[i])} bytes`],
      ["address", `0x${device.addresses.exact(i).toString(16)}`],
      ["stream", streamName(device.stream[i])],
      ["tag", device.run.texts[device.tag[i]]],
      ["allocated", moment(device, device.born[i], "before the first event", "")],
      ["freed", moment(device, device.freed[i], "before the first event", "never in this run")],
      ["cached", device.gone[i] === device.freed[i] ? "" : moment(device, device.gone[i], "", "queued work holds it to the end")],
      ["lifetime", device.events ? `${more}${counted(end - device.born[i], "event")}, ${duration(lived)}` : ""],
    ]),
    ...stackOf(device, device.stack[i], most),
  ];
}

function bandFacts(device, groups, band, at) {
  const { bytes, counts } = groups.at(at), groupsOfBand = band < COLORS ? [groups.top[band]] : null;
  let sum = 0, count = 0;
  bytes.forEach((value, g) => { if (groups.band[g] === band) { sum += value; count += counts[g]; } });
  const name = groupsOfBand ? groups.label(groupsOfBand[0]) : "all others";
  const stack = groupsOfBand && groups.by === "stack" ? stackOf(device, groups.values[groupsOfBand[0]], 8) : [];
  return [
    element("strong", { textContent: name }),
    facts([
      ["held", `${human(sum)} (${exact(sum)} bytes) in ${counted(count, "block")}`],
      ["of allocated", percent(sum, device.allocated[at])],
      ["at", `event ${exact(at)} · ${clock(device.time(at))}`],
    ]),
    ...stack,
  ];
}

function pieceFacts(device, piece, run, at) {
  const { segments } = device;
  const live = device.liveAt(at, true).filter((i) => run.from <= device.address[i] && device.address[i] < run.to);
  const used = live.reduce((sum, i) => sum + device.bytes[i], 0);
  return [
    element("strong", { textContent: `free space of a segment of ${human(run.bytes)}` }),
    facts([
      ["segment", `0x${run.from.toString(16)}, ${run.isPages ? "expandable" : "fixed"}`],
      ["stream", streamName(run.stream)],
      ["in use", `${human(used)} (${percent(used, run.bytes)}) in ${counted(live.length, "block")}`],
      [run.isPages ? "these pages" : "its memory", `${human(segments.bytes[piece])} from 0x${segments.addresses.exact(piece).toString(16)}`],
      [run.isPages ? "mapped" : "reserved", moment(device, segments.from[piece], "before the first event", "")],
      [run.isPages ? "unmapped" : "released", moment(device, segments.to[piece], "", "never in this run")],
    ]),
  ];
}

function row(color, name, bytes, part, share, onclick) {
  const meter = element("span", { className: "meter" }, element("i"));
  meter.firstChild.style.width = `${100 * share}%`;
  meter.firstChild.style.background = color;
  const swatch = element("span", { className: "swatch" });
  swatch.style.background = color;
  return element(
    "button", { className: "row", type: "button", title: name, onclick }, swatch,
    element("span", { className: "name", textContent: name }), element("span", { className: "bytes", textContent: human(bytes) }),
    element("span", { className: "part" }, meter, element("span", { textContent: part })),
  );
}

const ROWS = 60;
const WORDS = { stack: "call stack", tag: "tag", size: "size", stream: "stream" };

/** What held the memory at the moment, the most first. */
function drawHolders(state, select) {
  const { device, groups, moment: at } = state, panel = byId("holders"), { bytes, counts } = groups.at(at);
  const order = Array.from(bytes.keys()).filter((g) => counts[g]).sort((a, b) => bytes[b] - bytes[a]);
  panel.querySelector("h2").textContent = at === device.peak ? "What held the memory at the peak" : `What held the memory at event ${exact(at)}`;
  const why = groups.by === "size" && state.by === "allocation" ? " (the run was recorded without stacks and tags)" : "";
  panel.querySelector(".note").textContent = `${human(device.allocated[at])} allocated, by ${WORDS[groups.by]}${why}`;
  const rows = order.slice(0, ROWS).map((g) => {
    const made = row(
      colorOf(groups.band[g]), groups.label(g), bytes[g],
      `${percent(bytes[g], device.allocated[at])} · ${counted(counts[g], "block")}`,
      bytes[g] / device.allocated[at], () => select(g),
    );
    made.classList.toggle("on", state.litGroup === g);
    return made;
  });
  if (order.length > ROWS) {
    const rest = order.slice(ROWS).reduce((sum, g) => sum + bytes[g], 0);
    rows.push(element("p", { className: "note", textContent: `and ${exact(order.length - ROWS)} more with ${human(rest)} together` }));
  }
  panel.querySelector(".rows").replaceChildren(...rows);
}

function drawGroupDetail(state, group) {
  const { device, groups, moment: at } = state, { bytes, counts } = groups.at(at), mine = device.liveAt(at).filter((i) => groups.of[i] === group);
  const sizes = new Map();
  for (const i of mine) sizes.set(device.bytes[i], (sizes.get(device.bytes[i]) ?? 0) + 1);
  const most = [...sizes].sort((a, b) => b[0] * b[1] - a[0] * a[1]).slice(0, 4);
  byId("detail").querySelector(".body").replaceChildren(
    element("strong", { textContent: groups.label(group) }),
    facts([
      ["held", `${human(bytes[group])} (${exact(bytes[group])} bytes) in ${counted(counts[group], "block")} at event ${exact(at)}`],
      ["at the peak", human(groups.at(device.peak).bytes[group])],
      ["of", most.map(([size, count]) => `${exact(count)} × ${human(size)}`).join(", ") + (sizes.size > 4 ? ", …" : "")],
      ["oldest", mine.length ? moment(device, device.born[mine[0]], "before the first event", "") : ""],
    ]),
    ...(groups.by === "stack" ? stackOf(device, groups.values[group]) : []),
  );
}

function drawAllocationDetail(device, i) {
  byId("detail").querySelector(".body").replaceChildren(...allocationFacts(device, i));
}

/** The answer to "what happened", in a line. */
function drawHeadline(device, toMoment) {
  const { peak } = device, groups = device.group(device.best()), { bytes, counts } = groups.at(peak), line = byId("headline");
  line.replaceChildren();
  for (const oom of device.ooms.slice(-1)) {
    const times = device.ooms.length > 1 ? `${exact(device.ooms.length)} times, last` : "";
    line.append(element("span", { className: "alarm" },
      `Out of memory ${times} at event ${exact(oom.at)}: ${human(oom.bytes)} wanted, the device had ${human(oom.free)} free, ${human(device.reserved[oom.at] - device.allocated[oom.at])} reserved but not allocated.`,
      element("button", { type: "button", textContent: "go there", onclick: () => toMoment(oom.at) })));
  }
  const top = bytes.length ? highest(bytes, 0, bytes.length - 1) : -1;
  line.append(element("strong", { textContent: `Peak ${human(device.allocated[peak])} allocated` }));
  if (device.events) line.append(` at event ${exact(peak)} of ${exact(device.events)} (${clock(device.time(peak))})`);
  line.append("; ", element("strong", { textContent: `${human(device.reserved[highest(device.reserved, 0, device.events)])} reserved` }), " at most.");
  if (top < 0 || !bytes[top]) return;
  const what = groups.by === "size" ? `${exact(counts[top])} ${groups.label(top)}` : `${groups.label(top)} (${counted(counts[top], "block")})`;
  line.append(` Largest part, ${percent(bytes[top], device.allocated[peak])}: ${what}.`);
}

/** The allocations that a search means; null if it means nothing. */
function search(device, text) {
  const query = text.trim();
  if (!query) return null;
  const number = (value) => {
    const [, digits, unit] = /^([\d.,_]+)\s*([kmgt]?)(?:i?b)?$/i.exec(value.trim()) ?? [];
    return digits ? parseFloat(digits.replace(/[,_]/g, "")) * 1024 ** " kmgt".indexOf((unit || " ").toLowerCase()) : NaN;
  };
  const every = (is) => {
    const hits = [];
    for (let i = 0; i < device.count; i++) if (is(i)) hits.push(i);
    return hits;
  };
  const between = (from, to) => every((i) => (device.bytes[i] >= from && device.bytes[i] <= to) || (device.requested[i] >= from && device.requested[i] <= to));
  if (/^0x[0-9a-f]+$/i.test(query)) {
    const address = Number(query);
    return every((i) => device.address[i] <= address && address < device.address[i] + Math.max(1, device.bytes[i]));
  }
  const [, low, high] = /^(.+?)\.\.(.+)$/.exec(query) ?? [];
  if (low && !Number.isNaN(number(low)) && !Number.isNaN(number(high))) return between(number(low), number(high));
  const [, sign, bound] = /^(>=|<=|>|<|=)(.+)$/.exec(query) ?? [];
  if (sign && !Number.isNaN(number(bound))) {
    const n = number(bound);
    return { ">=": () => between(n, Infinity), ">": () => between(n + 1, Infinity), "<=": () => between(0, n), "<": () => between(0, n - 1), "=": () => between(n, n) }[sign]();
  }
  const [, key, rest] = /^(tag|stream):(.*)$/i.exec(query) ?? [];
  const has = (value, part) => value.toLowerCase().includes(part.trim().toLowerCase());
  if (key?.toLowerCase() === "stream") return every((i) => device.stream[i].toString() === rest.trim() || has(streamName(device.stream[i]), rest));
  // Texts are few: each is looked at once.
  const texts = device.run.texts.map((value) => has(value, rest ?? query));
  if (key) return every((i) => texts[device.tag[i]]);
  const { starts, frames, name, file } = device.run.stacks, stacks = new Uint8Array(starts.length);
  for (let s = 0; s + 1 < starts.length; s++) {
    for (let f = starts[s]; f < starts[s + 1] && !stacks[s]; f++) stacks[s] = texts[name[frames[f]]] || texts[file[frames[f]]] ? 1 : 0;
  }
  return every((i) => stacks[device.stack[i]] || (device.tag[i] > 0 && texts[device.tag[i]]));
}

function drawFound(state, select) {
  const { device, groups, hits, moment: at } = state, panel = byId("found");
  panel.hidden = !hits;
  if (!hits) return;
  const live = hits.filter((i) => device.born[i] <= at && device.freed[i] > at), held = live.reduce((sum, i) => sum + device.bytes[i], 0);
  panel.querySelector("h2").textContent = `Found ${counted(hits.length, "allocation")}; ${human(held)} in ${exact(live.length)} at event ${exact(at)}`;
  const most = (a, b) => device.bytes[b] - device.bytes[a] || a - b;
  const rows = [...live].sort(most).slice(0, ROWS);
  if (rows.length < ROWS) rows.push(...hits.filter((i) => !(device.born[i] <= at && device.freed[i] > at)).sort(most).slice(0, ROWS - rows.length));
  panel.querySelector(".rows").replaceChildren(...rows.map((i) => row(
    colorOf(groups.band[groups.of[i]]), `0x${device.addresses.exact(i).toString(16)}`, device.bytes[i],
    `${device.born[i] ? `event ${exact(device.born[i])}` : "before"} – ${device.freed[i] === NEVER ? "end" : exact(device.freed[i])}`, device.bytes[i] / device.bytes[rows[0]], () => select(i),
  )));
}
