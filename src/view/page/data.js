// The data: columns of numbers, and what follows from them. A moment n is after the first n events.

const NEVER = 0xffffffff;

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

async function load(element) {
  const packed = new Blob([bytesOf(element.textContent)]);
  element.remove();
  const buffer = await new Response(packed.stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const kinds = { u8: Uint8Array, u16: Uint16Array, u32: Uint32Array, u64: BigUint64Array };
  const array = ({ kind, offset, count }) => new kinds[kind](buffer, 8 + length + offset, count);
  const column = (place) => {
    if (place.values) return new Column(array(place.values), array(place));
    return place.kind === "u64" ? new Column(array(place), null) : array(place);
  };
  const table = (places) => Object.fromEntries(Object.entries(places).map(([name, place]) => [name, column(place)]));
  const run = { title: head.title, texts: head.texts, stacks: table(head.stacks) };
  run.devices = head.devices.map((device) => new Device(device, table, run));
  return run;
}

/** 64-bit integers: all of them, or the different ones and for each its place among them. */
class Column {
  constructor(values, places) { Object.assign(this, { values, places }); }

  exact(i) { return this.values[this.places ? this.places[i] : i]; }

  #halves(Kind) { return new Kind(this.values.buffer, this.values.byteOffset, 2 * this.values.length); }

  #all(values) {
    if (!this.places) return values;
    const { places } = this, out = new values.constructor(places.length);
    for (let i = 0; i < out.length; i++) out[i] = values[places[i]];
    return out;
  }

  /** As floating-point numbers: exact below 2^53. With `Signed` from -2^53 on. */
  numbers(Signed = Uint32Array) {
    const low = this.#halves(Uint32Array), high = this.#halves(Signed), values = new Float64Array(this.values.length);
    for (let i = 0; i < values.length; i++) values[i] = low[2 * i] + high[2 * i + 1] * 4294967296;
    return this.#all(values);
  }

  /** Those that are below 2^32. */
  small() {
    const low = this.#halves(Uint32Array), values = new Uint32Array(this.values.length);
    for (let i = 0; i < values.length; i++) values[i] = low[2 * i];
    return this.#all(values);
  }

  /** The running sums of integers with a sign. */
  sums() {
    const out = this.numbers(Int32Array);
    for (let i = 1; i < out.length; i++) out[i] += out[i - 1];
    return out;
  }
}

class Device {
  constructor(head, table, run) {
    this.run = run;
    this.ordinal = head.ordinal;
    this.events = head.events;
    const { address, requested, bytes, stream, born, freed, waited, stack, tag } = table(head.allocations);
    Object.assign(this, { addresses: address, address: address.numbers(), requested: requested.numbers() });
    Object.assign(this, { bytes: bytes.numbers(), stream: stream.numbers(), stack: stack.small(), tag: tag.small() });
    Object.assign(this, { born, freed, gone: waited.small() });
    for (let i = 0; i < freed.length; i++) this.gone[i] += freed[i];
    this.count = born.length;
    const segments = table(head.segments);
    this.segments = {
      addresses: segments.address, address: segments.address.numbers(), bytes: segments.bytes.numbers(),
      stream: segments.stream.numbers(), from: segments.from, to: segments.to, is_pages: segments.is_pages.small(),
    };
    this.times = table(head.times).steps.sums();
    const ooms = table(head.ooms), [wanted, free] = [ooms.bytes.numbers(), ooms.free.numbers()];
    this.ooms = Array.from(ooms.at, (at, i) => ({ at, bytes: wanted[i], free: free[i] }));
    this.#curves(head.reserved_at_start, table(head.reserved));
    this.peak = highest(this.allocated, 0, this.events);
    this.groups = new Map();
  }

  #curves(reservedAtStart, reserved) {
    const { born, freed, gone, bytes, events } = this;
    const allocated = new Float64Array(events + 2), active = new Float64Array(events + 2);
    // Which allocation is freed by the event that leads to a moment.
    const freedAt = new Int32Array(events + 1).fill(-1);
    for (let i = 0; i < this.count; i++) {
      if (freed[i] > born[i]) {
        allocated[born[i]] += bytes[i];
        if (freed[i] !== NEVER) { allocated[freed[i]] -= bytes[i]; freedAt[freed[i]] = i; }
      }
      active[born[i]] += bytes[i];
      if (gone[i] !== NEVER) active[gone[i]] -= bytes[i];
    }
    for (let m = 1; m <= events; m++) { allocated[m] += allocated[m - 1]; active[m] += active[m - 1]; }
    const held = new Float64Array(events + 1), values = reserved.bytes.numbers();
    let now = reservedAtStart, from = 0;
    for (let i = 0; i <= values.length; i++) {
      const to = i < values.length ? reserved.at[i] : events + 1;
      held.fill(now, from, to);
      from = to;
      now = values[i];
    }
    Object.assign(this, { allocated: allocated.subarray(0, events + 1), active: active.subarray(0, events + 1) });
    Object.assign(this, { reserved: held, freedAt });
  }

  /** The allocations that users hold at a moment; with `pending` also those that queued work does. */
  liveAt(moment, pending = false) {
    const { born, freed, gone } = this, until = pending ? gone : freed, live = [];
    // By birth: those after the moment are not looked at.
    for (let i = 0; i < this.count && born[i] <= moment; i++) if (until[i] > moment) live.push(i);
    return live;
  }

  segmentsAt(moment) {
    const { from, to } = this.segments, there = [];
    for (let i = 0; i < from.length; i++) if (from[i] <= moment && to[i] > moment) there.push(i);
    return there;
  }

  time(moment) { return this.times.length ? this.times[Math.max(0, Math.min(moment, this.events) - 1)] : NaN; }

  /** Groups of allocations by "tag", "stack", "size" or "stream". */
  group(by) {
    if (!this.groups.has(by)) this.groups.set(by, new Groups(this, by));
    return this.groups.get(by);
  }

  /** What tells most about where memory comes from. */
  best() {
    const has = (column) => {
      for (let i = 0; i < this.count; i++) if (column[i]) return true;
      return false;
    };
    return has(this.stack) ? "stack" : has(this.tag) ? "tag" : "size";
  }

  frames(stack) {
    const { starts, frames, name, file, line } = this.run.stacks, { texts } = this.run, out = [];
    for (let i = starts[stack]; i < starts[stack + 1]; i++) {
      const f = frames[i];
      out.push({ name: texts[name[f]], file: texts[file[f]], line: line[f] });
    }
    return out;
  }
}

/** The moment of the highest value in from..=to. */
function highest(values, from, to) {
  let best = from;
  for (let m = from + 1; m <= to; m++) if (values[m] > values[best]) best = m;
  return best;
}

// Frames that say little: those without a source, and those of libraries.
const NAMELESS = /^$|^\?\?$|<unknown>|\/rustc\/|\/c10\/|\/ATen\/|^(torch|aten|c10)\//;
const LIBRARY = /(site|dist)-packages\/|\/\.cargo\/registry\//;

class Groups {
  constructor(device, by) {
    this.device = device;
    this.by = by;
    const { bytes } = device;
    this.#assign({ tag: device.tag, stack: device.stack, size: bytes, stream: device.stream }[by]);
    if (by !== "size") return;
    // Of very many sizes none says much: then those between two powers of two go together.
    const atPeak = this.at(device.peak).bytes, shown = this.top.reduce((sum, group) => sum + atPeak[group], 0);
    this.isRanges = shown < 0.6 * device.allocated[device.peak];
    if (this.isRanges) this.#assign(bytes.map((size) => 2 ** Math.floor(Math.log2(Math.max(1, size)))));
  }

  /** One group for each value of a column. */
  #assign(column) {
    this.values = []; // of each group
    this.of = new Uint32Array(column.length);
    const known = new Map();
    column.forEach((value, i) => {
      let group = known.get(value);
      if (group === undefined) {
        known.set(value, group = this.values.length);
        this.values.push(value);
      }
      this.of[i] = group;
    });
    this.#rank();
  }

  /** Bytes and counts of each group at a moment. */
  at(moment) {
    const sums = new Float64Array(this.values.length), counts = new Uint32Array(this.values.length);
    const { of } = this, { bytes, born, freed, count } = this.device;
    for (let i = 0; i < count && born[i] <= moment; i++) {
      if (freed[i] > moment) { sums[of[i]] += bytes[i]; counts[of[i]]++; }
    }
    return { bytes: sums, counts };
  }

  /** The groups with a colour of their own: the largest at the peak, then those that are large at other times. */
  #rank() {
    const { peak, events } = this.device, score = this.at(peak).bytes, elsewhere = new Float64Array(score.length);
    for (let k = 0; k <= 24; k++) {
      this.at(Math.floor(events * k / 24)).bytes.forEach((bytes, g) => { elsewhere[g] = Math.max(elsewhere[g], bytes); });
    }
    const order = (scores, n) =>
      Array.from(scores.keys()).filter((g) => scores[g] > 0).sort((a, b) => scores[b] - scores[a]).slice(0, n);
    const chosen = [...new Set([...order(score, COLORS - 2), ...order(elsewhere, COLORS)])].slice(0, COLORS);
    this.top = chosen;
    this.band = new Uint8Array(this.values.length).fill(COLORS); // COLORS is that of all others
    chosen.forEach((group, band) => { this.band[group] = band; });
  }

  label(group) {
    const value = this.values[group];
    if (this.by === "size") return `blocks of ${human(value)}${this.isRanges ? ` to ${human(2 * value)}` : ""}`;
    if (this.by === "stream") return streamName(value);
    if (this.by === "tag") return this.device.run.texts[value] || "(no tag)";
    const frames = this.device.frames(value);
    if (!frames.length) return "(no stack recorded)";
    // Where it was allocated, and which line of the program led there.
    const inner = frames.find(({ file }) => !NAMELESS.test(file)) ?? frames[0];
    const own = frames.find(({ file }) => !NAMELESS.test(file) && !LIBRARY.test(file));
    return own && own !== inner ? `${frameText(inner)} ← ${frameText(own)}` : frameText(inner);
  }
}

const frameText = ({ name, file, line }) => `${name || "?"} ${file.split("/").slice(-2).join("/")}${line ? `:${line}` : ""}`;
const streamName = (stream) => stream === 0 ? "default stream" : `stream ${stream < 65536 ? stream : `0x${stream.toString(16)}`}`;

function human(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let unit = 0;
  for (let rest = Math.abs(bytes); rest >= 1024 && unit < units.length - 1; rest /= 1024) unit++;
  return unit ? `${(bytes / 1024 ** unit).toFixed(2)} ${units[unit]}` : `${bytes} B`;
}
const counted = (count, what) => `${exact(count)} ${what}${count === 1 ? "" : "s"}`;
const exact = (count) => String(count).replace(/\B(?=(\d{3})+$)/g, ",");
const percent = (part, whole) => whole > 0 ? `${(100 * part / whole).toFixed(1)} %` : "–";

function duration(us) {
  if (us < 1000) return `${us} µs`;
  if (us < 1e6) return `${(us / 1e3).toFixed(2)} ms`;
  return us < 60e6 ? `${(us / 1e6).toFixed(3)} s` : `${Math.floor(us / 60e6)} min ${((us % 60e6) / 1e6).toFixed(1)} s`;
}

/** The time of day, in UTC. */
function clock(us) {
  const date = new Date(us / 1000);
  return Number.isNaN(date.getTime()) ? "" : `${date.toISOString().slice(11, 23)} UTC`;
}
