// Memory over time, and fragmentation below it: a column of pixels shows the moment of those in it when most was held.

class Plot {
  constructor(id) {
    this.box = document.getElementById(id);
    [this.base, this.over] = this.box.querySelectorAll("canvas");
    this.scale = 1;
  }

  fit() {
    this.scale = window.devicePixelRatio || 1;
    this.width = Math.max(1, Math.round(this.box.clientWidth * this.scale));
    this.height = Math.max(1, Math.round(this.box.clientHeight * this.scale));
    for (const canvas of [this.base, this.over]) Object.assign(canvas, { width: this.width, height: this.height });
  }

  /** The pixel under the pointer. */
  at(event) {
    const box = this.over.getBoundingClientRect();
    const place = (value, size) => Math.max(0, Math.min(size - 1, Math.floor(value * this.scale)));
    return [place(event.clientX - box.left, this.width), place(event.clientY - box.top, this.height)];
  }

  /** The top layer, empty. */
  clear() {
    const over = this.over.getContext("2d");
    over.clearRect(0, 0, this.width, this.height);
    over.font = `${11 * this.scale}px system-ui, "DejaVu Sans", sans-serif`;
    return over;
  }

  text(context, text, x, y, color, align = "left") {
    if (!text) return;
    const { scale } = this, { width } = context.measureText(text);
    const left = x - (align === "right" ? width : align === "center" ? width / 2 : 0);
    context.globalAlpha = 0.85;
    context.fillStyle = style("panel");
    context.fillRect(left - 3 * scale, y - 10.5 * scale, width + 6 * scale, 14 * scale);
    context.globalAlpha = 1;
    context.fillStyle = color;
    context.fillText(text, left, y);
  }
}

/** The moment that each column of pixels shows, and the highest of each curve in it. */
function columns(device, from, to, width) {
  const reps = new Uint32Array(width), top = { active: new Float64Array(width), reserved: new Float64Array(width) };
  const gap = new Float64Array(width), pending = new Float64Array(width), step = (to - from) / width;
  const { allocated, active, reserved, events } = device;
  for (let c = 0; c < width; c++) {
    let first = Math.ceil(from + c * step), last = Math.ceil(from + (c + 1) * step) - 1;
    if (last < first) first = last = Math.floor(from + c * step);
    first = Math.min(first, events);
    last = Math.min(last, events);
    let rep = first;
    for (let m = first; m <= last; m++) {
      if (allocated[m] > allocated[rep]) rep = m;
      if (active[m] > top.active[c]) top.active[c] = active[m];
      if (reserved[m] > top.reserved[c]) top.reserved[c] = reserved[m];
      gap[c] = Math.max(gap[c], reserved[m] - allocated[m]);
      pending[c] = Math.max(pending[c], active[m] - allocated[m]);
    }
    reps[c] = rep;
  }
  return { reps, top, gap, pending };
}

/** Goes through the moments of the columns, telling what is born and freed on the way. */
function sweep(device, reps, on) {
  const { born, freed, freedAt, count } = device;
  let moment = reps[0], next = 0;
  for (const i of device.liveAt(moment)) on.born(i);
  for (let low = 0, high = count; low < high; next = low) {
    const middle = (low + high) >> 1;
    if (born[middle] <= moment) low = middle + 1; else high = middle;
  }
  while (next < count && born[next] <= moment) next++;
  for (let c = 0; c < reps.length; c++) {
    while (moment < reps[c]) {
      moment++;
      if (freedAt[moment] >= 0) on.freed(freedAt[moment]);
      for (; next < count && born[next] === moment; next++) if (freed[next] > moment) on.born(next);
    }
    on.column(c);
  }
}

class Timeline {
  constructor() {
    this.plot = new Plot("memory");
    this.fragmentation = new Plot("fragmentation");
  }

  /** Draws everything that depends on the range shown. */
  draw(state) {
    const { device, from, to } = state, { plot } = this;
    plot.fit();
    this.fragmentation.fit();
    const { width, height } = plot;
    this.columns = columns(device, from, to, width);
    this.most = Math.max(1, ...this.columns.top.reserved, ...this.columns.top.active) * 1.06;
    // What is at each pixel: an allocation or a band; -1 is nothing.
    this.ids = new Int32Array(width * height).fill(-1);
    this.isBands = state.by !== "allocation" && !state.hits;
    const image = new ImageData(width, height), out = new Uint32Array(image.data.buffer);
    if (this.isBands) this.#bands(state, out); else this.#allocations(state, out);
    plot.base.getContext("2d").putImageData(image, 0, 0);
    Object.assign(plot.box.dataset, { from, to, most: this.most, width, height });
    this.#gaps(state);
    this.mark(state);
  }

  #allocations({ device, groups, lit }, out) {
    const { width, height } = this.plot, { bytes } = device, { ids } = this, scale = height / this.most;
    const colors = pixels(), { of, band } = groups, dim = pixel(style("dim"));
    // Those that live, oldest first.
    const next = new Int32Array(device.count + 1).fill(-1), last = new Int32Array(device.count + 1).fill(-1);
    const end = device.count; // the list's own entry: its next is the first, its last the last
    next[end] = last[end] = end;
    sweep(device, this.columns.reps, {
      born(i) { const old = last[end]; next[old] = i; last[i] = old; next[i] = end; last[end] = i; },
      freed(i) { if (next[i] >= 0) { next[last[i]] = next[i]; last[next[i]] = last[i]; next[i] = -1; } },
      column(c) {
        let sum = 0, low = 0;
        for (let i = next[end]; i !== end; i = next[i]) {
          sum += bytes[i];
          const high = Math.min(height, Math.round(sum * scale));
          if (high > low) {
            const color = lit && !lit[i] ? dim : colors[band[of[i]]][i % 5];
            for (let at = (height - 1 - low) * width + c; low < high; low++, at -= width) { out[at] = color; ids[at] = i; }
          }
        }
      },
    });
  }

  #bands({ device, groups, litGroup }, out) {
    const { width, height } = this.plot, { bytes } = device, { ids } = this, scale = height / this.most;
    const { of, band } = groups, sums = new Float64Array(COLORS + 1), colors = pixels(), dim = pixel(style("dim"));
    sweep(device, this.columns.reps, {
      born(i) { sums[band[of[i]]] += bytes[i]; },
      freed(i) { sums[band[of[i]]] -= bytes[i]; },
      column(c) {
        let sum = 0, low = 0;
        for (let b = 0; b <= COLORS; b++) {
          sum += sums[b];
          const high = Math.min(height, Math.round(sum * scale));
          const color = litGroup !== null && band[litGroup] !== b ? dim : colors[b][0];
          for (let at = (height - 1 - low) * width + c; low < high; low++, at -= width) { out[at] = color; ids[at] = b; }
        }
      },
    });
  }

  #gaps() {
    const plot = this.fragmentation, { width, height, scale } = plot, { gap, pending } = this.columns;
    const context = plot.base.getContext("2d");
    this.mostGap = Math.max(1, ...gap) * 1.15;
    const area = (values, color) => {
      context.fillStyle = color;
      context.beginPath();
      context.moveTo(0, height);
      values.forEach((value, c) => { context.lineTo(c, height - value / this.mostGap * height); context.lineTo(c + 1, height - value / this.mostGap * height); });
      context.lineTo(width, height);
      context.fill();
    };
    area(gap, style("cached"));
    area(pending, style("pending"));
    this.#scale(context, plot, this.mostGap, 2 * scale);
  }

  #scale(context, plot, most, inset) {
    const { width, height, scale } = plot;
    context.font = `${11 * scale}px system-ui, "DejaVu Sans", sans-serif`;
    let step = 2 ** Math.floor(Math.log2(most / (height / scale / 45)));
    while (most / step > height / scale / 34) step *= 2;
    for (let value = step; value < most; value += step) {
      const y = height - value / most * height;
      if (y < 8 * scale) break;
      context.fillStyle = style("soft");
      context.globalAlpha = 0.25;
      context.fillRect(0, Math.round(y), width, 1);
      context.globalAlpha = 1;
      plot.text(context, human(value), inset + 4 * scale, y + 4 * scale, style("soft"));
    }
  }

  x(state, moment) { return (moment + 0.5 - state.from) / (state.to - state.from) * this.plot.width; }

  /** The top layer: lines, markers, the moment, what the pointer is on. */
  mark(state) {
    const { plot } = this, { device } = state, { width, height, scale } = plot, over = plot.clear();
    if (state.pointed) this.#outline(over, state.pointed);
    const curve = (values, color, weight) => {
      over.strokeStyle = color;
      over.lineWidth = weight * scale;
      over.beginPath();
      values.forEach((value, c) => over.lineTo(c + 0.5, height - value / this.most * height));
      over.stroke();
    };
    curve(this.columns.top.active, style("active"), 1);
    curve(this.columns.top.reserved, style("reserved"), 1.5);
    this.#scale(over, plot, this.most, 0);
    this.#axis(over, state);
    const line = (context, moment, color, dash = []) => {
      const x = this.x(state, moment);
      if (x < 0 || x > width) return null;
      context.setLineDash(dash.map((length) => length * scale));
      context.strokeStyle = color;
      context.lineWidth = 1.5 * scale;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height);
      context.stroke();
      context.setLineDash([]);
      return x;
    };
    const label = (x, text, color, row) => {
      if (x === null) return;
      const isLeft = x > width * 0.7;
      plot.text(over, text, x + (isLeft ? -5 : 5) * scale, (12 + 14 * row) * scale, color, isLeft ? "right" : "left");
    };
    for (const oom of device.ooms.slice(-200)) label(line(over, oom.at, style("alarm")), "out of memory", style("alarm"), 2);
    label(line(over, device.peak, style("ink"), [4, 3]), `peak: ${human(device.allocated[device.peak])} allocated`, style("ink"), 0);
    label(line(over, state.moment, style("mark")), state.moment === device.peak ? "" : "moment", style("mark"), 1);
    const below = this.fragmentation.clear();
    line(below, device.peak, style("ink"), [4, 3]);
    line(below, state.moment, style("mark"));
    if (state.column !== null) {
      for (const context of [over, below]) {
        context.fillStyle = style("soft");
        context.fillRect(state.column, 0, 1, height);
      }
    }
  }

  #axis(over, state) {
    const { width, height, scale } = this.plot, { device } = state, start = device.time(1);
    for (let k = 1; k < 5; k++) {
      const x = width * k / 5, moment = Math.floor(state.from + (state.to - state.from) * k / 5);
      const since = device.events ? ` · +${duration(device.time(moment) - start)}` : "";
      this.plot.text(over, `event ${exact(moment)}${since}`, x, height - 5 * scale, style("soft"), "center");
    }
  }

  /** Brightens what is pointed at. */
  #outline(over, pointed) {
    if (pointed.plot !== "memory" || pointed.id < 0) return;
    const { width, height } = this.plot, { ids } = this, to = theme() === "dark" ? "rgb(255 255 255 / 35%)" : "rgb(0 0 0 / 30%)";
    over.fillStyle = to;
    for (let c = 0; c < width; c++) {
      let low = -1;
      for (let y = 0; y <= height; y++) {
        const is = y < height && ids[y * width + c] === pointed.id;
        if (is && low < 0) low = y;
        if (!is && low >= 0) { over.fillRect(c, low, 1, y - low); break; }
      }
    }
  }

  /** What is at a pixel: the moment, and the allocation or the band. */
  look([x, y]) {
    return { plot: "memory", moment: this.columns.reps[x], id: this.ids[y * this.plot.width + x], isBand: this.isBands };
  }
}

