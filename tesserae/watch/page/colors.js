// Colours: told apart with every kind of colour vision; the same in both themes.
const STAGE_COLORS = { data: "#a569a8", forward: "#2a7fc4", gather: "#7cc3ec", backward: "#e69f00", reduce: "#e3cf4e", optimizer: "#169b76", between: "#98a2af" };
const MORE_COLORS = ["#2a7fc4", "#e69f00", "#169b76", "#7cc3ec", "#a569a8", "#d8c23c", "#b5651d", "#98a2af"];
const stageColor = (name, index) => STAGE_COLORS[name] || MORE_COLORS[index % MORE_COLORS.length];
let theme = {};
const readTheme = () => {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["bg", "card", "line", "soft", "text", "dim", "faint", "accent", "alarm", "good", "cold", "warm", "mid", "track", "band", "focus", "ink"]) {
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
};
const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mix = (from, to, share) => {
  const [a, b] = [rgb(from), rgb(to)];
  return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * share)).join(",")})`;
};
const stored = () => { try { return localStorage.getItem("tesserae-theme"); } catch { return null; } };
let chosenTheme = ["dark", "light"].includes(stored()) ? stored() : "system";
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const applyTheme = () => {
  const dark = chosenTheme === "dark" || (chosenTheme === "system" && systemDark.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").title = `Theme: ${chosenTheme}`;
  readTheme();
  drawAll();
};
