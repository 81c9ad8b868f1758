// What is shown, and what the pointer and the keys change of it.

const state = {
  device: null, by: "allocation", groups: null, from: 0, to: 1, moment: 0,
  lit: null, litGroup: null, hits: null, segment: null, pointed: null, column: null,
};
let timeline, map, run;

function drawMoment() {
  const { device, moment: at } = state;
  byId("moment").value = at;
  const since = device.events ? ` · ${clock(device.time(at))}` : "";
  byId("when").textContent = `event ${exact(at)}${since} · ${human(device.allocated[at])} allocated · ${human(device.reserved[at])} reserved`;
  const gap = device.reserved[at] - device.allocated[at];
  byId("gap").textContent = `${human(gap)} reserved, not allocated (${percent(gap, device.reserved[at])})`;
  map.draw(state);
  timeline.mark(state);
  drawHolders(state, selectGroup);
  drawFound(state, selectAllocation);
}

function drawAll() {
  timeline.draw(state);
  drawMoment();
}

/** Runs `draw` once before the next frame, however often it is asked for. */
function soon(draw) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; draw(); });
  };
}
const drawMomentSoon = soon(drawMoment), drawAllSoon = soon(drawAll);

function toMoment(at) {
  state.moment = Math.max(0, Math.min(state.device.events, Math.round(at)));
  const { from, to, moment: m } = state;
  if (m < from || m >= to) {
    setRange(m - (to - from) / 2, m + (to - from) / 2);
  } else {
    drawMomentSoon();
  }
}

function setRange(from, to) {
  const end = state.device.events + 1, length = Math.min(end, Math.max(8, to - from));
  state.from = Math.max(0, Math.min(end - length, from));
  state.to = state.from + length;
  drawAllSoon();
}

function light(mask, group) {
  state.lit = mask;
  state.litGroup = group;
}

function selectGroup(group) {
  const { groups, device } = state, again = state.litGroup === group;
  const mask = again ? null : Uint8Array.from(groups.of, (g) => g === group ? 1 : 0);
  light(mask, again ? null : group);
  state.hits = null;
  byId("search").value = "";
  if (!again) drawGroupDetail(state, group);
  drawAllSoon();
}

function selectAllocation(i) {
  const { device } = state;
  drawAllocationDetail(device, i);
  if (!(device.born[i] <= state.moment && device.freed[i] > state.moment)) toMoment(device.born[i]);
}

function setBy(by) {
  state.by = by;
  state.groups = state.device.group(by === "allocation" ? state.device.best() : by);
  if (state.litGroup !== null) light(null, null);
}

function setDevice(device) {
  Object.assign(state, { device, from: 0, to: device.events + 1, moment: device.peak, hits: null, segment: null, pointed: null, column: null });
  light(null, null);
  setBy("allocation");
  byId("by").value = state.by;
  byId("moment").max = device.events;
  byId("all-segments").hidden = true;
  byId("search").value = "";
  drawHeadline(device, toMoment);
  if (state.groups.top.length) drawGroupDetail(state, state.groups.top[0]);
  drawAll();
}

function find() {
  const { device } = state, started = performance.now();
  state.hits = search(device, byId("search").value);
  if (state.hits) {
    const mask = new Uint8Array(device.count);
    for (const i of state.hits) mask[i] = 1;
    light(mask, null);
  } else {
    light(null, null);
  }
  drawAll();
  measure("search", started);
}

/** For the developer's tools and the page's test: how long the last of a kind took. */
function measure(name, start) {
  performance.clearMeasures(`vramalloc:${name}`);
  performance.measure(`vramalloc:${name}`, { start });
}

function tip(event, content) {
  const box = byId("tip");
  box.hidden = !content;
  if (!content) return;
  box.replaceChildren(...content);
  const { width, height } = box.getBoundingClientRect();
  // Beside the plots are the rows, which should stay in sight.
  const right = byId("left").getBoundingClientRect().right;
  const x = event.clientX + 16 + width > right ? event.clientX - 16 - width : event.clientX + 16;
  const y = event.clientY + 16 + height > innerHeight ? event.clientY - 16 - height : event.clientY + 16;
  box.style.left = `${Math.max(4, x)}px`;
  box.style.top = `${Math.max(4, y)}px`;
}

function overviewFacts(at) {
  const { device } = state, gap = device.reserved[at] - device.allocated[at];
  return [facts([
    ["at", `event ${exact(at)} · ${clock(device.time(at))}`],
    ["allocated", `${human(device.allocated[at])} (${exact(device.allocated[at])} bytes)`],
    ["active", `${human(device.active[at])} (${exact(device.active[at])} bytes)`],
    ["reserved", `${human(device.reserved[at])} (${exact(device.reserved[at])} bytes)`],
    ["reserved − allocated", `${human(gap)} (${percent(gap, device.reserved[at])})`],
  ])];
}

function hover(event, found) {
  const { device, groups } = state;
  state.pointed = found;
  let content = null;
  if (found.id >= 0) {
    content = found.isBand ? bandFacts(device, groups, found.id, found.moment) : allocationFacts(device, found.id, 8);
  } else if (found.plot === "map" && found.id <= -2) {
    const piece = -2 - found.id;
    content = pieceFacts(device, piece, map.runOf(device.segments.address[piece]), state.moment);
  } else if (found.plot !== "map") {
    content = overviewFacts(found.moment);
  }
  Object.assign(byId("tip").dataset, { moment: found.moment ?? state.moment, plot: found.plot });
  tip(event, content);
  timeline.mark(state);
  map.mark(state);
  measure("hover", event.timeStamp);
}

function leave(event) {
  Object.assign(state, { pointed: null, column: null });
  tip(event, null);
  timeline.mark(state);
  map.mark(state);
}

function listenToTimeline(plot, look) {
  let drag = null;
  plot.over.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from: state.from, to: state.to, moved: false };
    plot.over.setPointerCapture(event.pointerId);
  });
  plot.over.addEventListener("pointermove", (event) => {
    if (drag && Math.abs(event.clientX - drag.x) > 3) drag.moved = true;
    if (drag?.moved) {
      const by = (drag.x - event.clientX) / plot.box.clientWidth * (drag.to - drag.from);
      setRange(drag.from + by, drag.to + by);
      return;
    }
    state.column = plot.at(event)[0];
    hover(event, look(plot.at(event)));
  });
  plot.over.addEventListener("pointerup", (event) => {
    const isClick = drag && !drag.moved;
    drag = null;
    if (!isClick) return;
    const found = look(plot.at(event));
    if (found.id >= 0 && found.isBand && found.id < COLORS) drawGroupDetail({ ...state, moment: found.moment }, state.groups.top[found.id]);
    if (found.id >= 0 && !found.isBand) drawAllocationDetail(state.device, found.id);
    toMoment(found.moment);
  });
  plot.over.addEventListener("pointerleave", leave);
  plot.over.addEventListener("wheel", (event) => {
    event.preventDefault();
    const { from, to } = state, [x] = plot.at(event), center = from + (to - from) * x / plot.width;
    const by = event.deltaX && !event.deltaY ? 1 : Math.exp(event.deltaY * 0.0015), slide = event.deltaY ? 0 : event.deltaX / plot.width * (to - from);
    setRange(center - (center - from) * by + slide, center + (to - center) * by + slide);
  }, { passive: false });
}

function listen() {
  listenToTimeline(timeline.plot, (at) => timeline.look(at));
  listenToTimeline(timeline.fragmentation, ([x]) => ({ plot: "fragmentation", moment: timeline.columns.reps[x], id: -1, isBand: false }));
  const { over } = map.plot;
  over.addEventListener("pointermove", (event) => hover(event, map.look(map.plot.at(event))));
  over.addEventListener("pointerleave", leave);
  over.addEventListener("click", (event) => {
    const { id } = map.look(map.plot.at(event)), { device } = state;
    if (id === -1) return;
    if (id >= 0) drawAllocationDetail(device, id);
    state.segment = id >= 0 ? device.address[id] : device.segments.address[-2 - id];
    byId("all-segments").hidden = false;
    drawMomentSoon();
  });
  const all = () => { state.segment = null; byId("all-segments").hidden = true; drawMomentSoon(); };
  byId("all-segments").onclick = all;
  byId("moment").oninput = (event) => toMoment(Number(event.target.value));
  byId("before").onclick = () => toMoment(state.moment - 1);
  byId("after").onclick = () => toMoment(state.moment + 1);
  byId("to-peak").onclick = () => toMoment(state.device.peak);
  byId("zoom").onclick = () => {
    const { moment: m, device } = state, around = Math.max(200, device.events / 200);
    setRange(m - around, m + around);
  };
  byId("fit").onclick = () => setRange(0, state.device.events + 1);
  byId("by").onchange = (event) => { setBy(event.target.value); drawAllSoon(); };
  byId("theme").onclick = () => { toggleTheme(theme() === "dark" ? "light" : "dark"); drawAll(); };
  let wait = 0;
  byId("search").oninput = () => { clearTimeout(wait); wait = setTimeout(find, 120); };
  byId("device").onchange = (event) => setDevice(run.devices[event.target.value]);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") { byId("search").value = ""; state.hits = null; light(null, null); state.segment = null; byId("all-segments").hidden = true; drawAllSoon(); }
    if (event.key === "/" && event.target === document.body) { event.preventDefault(); byId("search").focus(); }
  });
  addEventListener("resize", drawAllSoon);
}

async function open() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  toggleTheme(dark.matches ? "dark" : "light");
  run = await load(byId("data"));
  document.title = `${run.title} – GPU memory`;
  byId("title").textContent = run.title;
  if (!run.devices.length) {
    byId("headline").textContent = "The snapshot has neither events nor segments.";
    document.querySelector("main").hidden = true;
    document.documentElement.dataset.open = "yes";
    return;
  }
  timeline = new Timeline();
  map = new SegmentMap();
  byId("device").hidden = run.devices.length < 2;
  run.devices.forEach((device, at) => byId("device").append(element("option", { value: at, textContent: `GPU ${device.ordinal}` })));
  listen();
  setDevice(run.devices.reduce((most, device) => device.allocated[device.peak] > most.allocated[most.peak] ? device : most));
  byId("device").value = run.devices.indexOf(state.device);
  dark.addEventListener("change", () => { toggleTheme(dark.matches ? "dark" : "light"); drawAll(); });
  measure("open", 0);
  document.documentElement.dataset.open = "yes";
}

open().catch((error) => {
  byId("headline").replaceChildren(element("span", { className: "alarm", textContent: `The page cannot be shown: ${error.message}. It needs a browser of 2023 or newer.` }));
  console.error(error);
});
