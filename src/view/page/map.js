// The segments at a moment, one after another in rows, each with its blocks.

const PAGE_BYTES = 2 * 1024 * 1024;

class SegmentMap {
  constructor() { this.plot = new Plot("map"); }

  draw(state) {
    const { device, moment } = state, { plot } = this, { segments } = device;
    plot.fit();
    const { width, height, scale } = plot;
    const runs = this.#runs(device, moment);
    this.shown = state.segment === null ? runs : runs.filter((run) => run.from <= state.segment && state.segment < run.to);
    if (!this.shown.length) this.shown = runs;
    this.runs = runs;

    const rowHeight = Math.round(16 * scale), gap = Math.round(4 * scale);
    const rows = Math.max(1, Math.floor((height - gap) / (rowHeight + gap)));
    const total = this.shown.reduce((sum, run) => sum + run.bytes, 0), pieces = this.shown.reduce((sum, run) => sum + run.pieces.length, 0);
    const space = rows * width, between = Math.round(3 * scale);
    // Space between segments, and a little between the pages that were mapped at different times.
    const spaced = this.shown.length * between + pieces < space * 0.3;
    const perByte = total ? (space - (spaced ? this.shown.length * between + pieces : 0)) / total : 0;
    const colors = new Uint32Array(space), ids = new Int32Array(space).fill(-1); // -2 - n: free space of piece n
    const free = pixel(style("free")), pageMark = pixel(style("line")), pending = pixel(style("pending")), dim = pixel(style("dim"));
    const palette = pixels(), { of, band } = state.groups, { lit } = state;
    const blocks = device.liveAt(moment, true).sort((a, b) => device.address[a] - device.address[b]);
    const fill = (from, to, color, id) => {
      const first = Math.max(0, Math.round(from)), end = Math.min(space, Math.max(Math.round(to), first + 1));
      for (let p = first; p < end; p++) { colors[p] = color; ids[p] = id; }
    };
    let at = 0;
    for (const run of this.shown) {
      for (const piece of run.pieces) {
        const start = segments.address[piece], bytes = segments.bytes[piece];
        fill(at, at + bytes * perByte, free, -2 - piece);
        if (segments.is_pages[piece] && PAGE_BYTES * perByte >= 6) {
          for (let page = PAGE_BYTES - start % PAGE_BYTES; page < bytes; page += PAGE_BYTES) {
            fill(at + page * perByte, at + page * perByte, pageMark, -2 - piece);
          }
        }
        // A block can go on over several pieces.
        for (let b = this.#firstEndingAfter(device, blocks, start); b < blocks.length; b++) {
          const i = blocks[b], low = Math.max(device.address[i], start), high = Math.min(device.address[i] + device.bytes[i], start + bytes);
          if (low >= start + bytes) break;
          if (high <= low) continue;
          const color = device.freed[i] <= moment ? pending : lit && !lit[i] ? dim : palette[band[of[i]]][i % 5];
          fill(at + (low - start) * perByte, at + (high - start) * perByte, color, i);
        }
        at += bytes * perByte + (spaced ? 1 : 0);
      }
      at += spaced ? between : 0;
    }
    this.ids = ids;
    this.row = { height: rowHeight, gap, count: rows };
    const image = new ImageData(width, height), out = new Uint32Array(image.data.buffer);
    for (let row = 0; row < rows; row++) {
      const line = colors.subarray(row * width, (row + 1) * width), top = gap + row * (rowHeight + gap);
      for (let y = top; y < Math.min(height, top + rowHeight); y++) out.set(line, y * width);
    }
    plot.base.getContext("2d").putImageData(image, 0, 0);
    this.mark(state);
  }

  /** Pieces that follow each other in one reservation are a segment. */
  #runs(device, moment) {
    const { segments } = device, runs = [];
    for (const piece of device.segmentsAt(moment)) {
      const last = runs.at(-1), from = segments.address[piece], to = from + segments.bytes[piece];
      const goesOn = last && last.to === from && last.isPages && segments.is_pages[piece] && last.stream === segments.stream[piece];
      if (goesOn) {
        last.to = to;
        last.bytes += to - from;
        last.pieces.push(piece);
      } else {
        runs.push({ from, to, bytes: to - from, isPages: segments.is_pages[piece] > 0, stream: segments.stream[piece], pieces: [piece] });
      }
    }
    return runs;
  }

  #firstEndingAfter(device, blocks, address) {
    let low = 0, high = blocks.length;
    while (low < high) {
      const middle = (low + high) >> 1, i = blocks[middle];
      if (device.address[i] + device.bytes[i] <= address) low = middle + 1; else high = middle;
    }
    return low;
  }

  /** The segment that has an address. */
  runOf(address) { return this.runs.find((run) => run.from <= address && address < run.to); }

  mark(state) {
    const over = this.plot.clear();
    if (!this.runs.length) this.plot.text(over, "nothing is reserved", this.plot.width / 2, 30 * this.plot.scale, style("soft"), "center");
    const id = state.pointed && !state.pointed.isBand ? state.pointed.id : -1;
    if (id < 0) return;
    over.fillStyle = theme() === "dark" ? "rgb(255 255 255 / 45%)" : "rgb(0 0 0 / 40%)";
    const { width } = this.plot, { height, gap } = this.row;
    for (let p = 0; p < this.ids.length; p++) {
      if (this.ids[p] === id) over.fillRect(p % width, gap + Math.floor(p / width) * (height + gap), 1, height);
    }
  }

  look([x, y]) {
    const { height, gap, count } = this.row, row = Math.floor((y - gap) / (height + gap));
    const isInside = y >= gap && row < count && (y - gap) % (height + gap) < height;
    return { plot: "map", id: isInside ? this.ids[row * this.plot.width + x] : -1, isBand: false };
  }
}
