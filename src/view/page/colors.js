// Colours: of the largest groups one each, the others are grey.

const COLORS = 12;
const HUES = {
  light: ["#2f6fd0", "#e07b39", "#2f9e6e", "#c2477f", "#8a63c9", "#c9a227", "#2aa0b8", "#a8552f", "#7a9a3a", "#d4697a", "#5a6fa8", "#9c7a5a", "#b4b8c0"],
  dark: ["#5b95f0", "#ee9255", "#46b988", "#e0689d", "#a986e6", "#d9b740", "#45b9d1", "#c8734a", "#98b953", "#ea8795", "#7f93cc", "#b8977a", "#5c626d"],
};

function theme() { return document.documentElement.dataset.theme === "dark" ? "dark" : "light"; }

function toggleTheme(to) { document.documentElement.dataset.theme = to; }

const colorOf = (band) => HUES[theme()][band];
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A colour as a pixel of ImageData, lighter or darker by `shade`. */
function pixel(color, shade = 1) {
  const value = parseInt(color.slice(1), 16), part = (shift) => Math.min(255, ((value >> shift) & 255) * shade) | 0;
  return (255 << 24 | part(0) << 16 | part(8) << 8 | part(16)) >>> 0;
}

/** Pixels by band and shade: neighbours of one group can be told apart. */
const SHADES = [1, 0.9, 1.08, 0.95, 1.04];
const OTHERS = [0.8, 1, 1.2, 0.9, 1.1];
function pixels() {
  return HUES[theme()].map((color, band) => (band < COLORS ? SHADES : OTHERS).map((shade) => pixel(color, shade)));
}
