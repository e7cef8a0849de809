"use strict";
// The page of a run. It asks the server that served it once a second, keeps what it got, and draws; nothing else is
// asked for. Sections are made once and then only filled, so that nothing jumps.

// Small things.
const $ = (id) => document.getElementById(id);
const el = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "color") made.style.background = value;
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
};
const set = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const list = (value) => (Array.isArray(value) ? value : []);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const sum = (values) => values.reduce((total, value) => total + (isNumber(value) ? value : 0), 0);
const median = (values) => {
  const sorted = values.filter(isNumber).sort((a, b) => a - b);
  if (!sorted.length) return NaN;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
};
const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;

// Numbers as people read them: three digits that count, a unit, a thin gap.
const whole = (value) => Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, ",");
const digits = (value) => {
  const size = Math.abs(value);
  if (size >= 1e5) return value.toPrecision(3);
  if (size >= 100) return whole(value);
  return size >= 10 ? value.toFixed(1) : size >= 1 ? value.toFixed(2) : size === 0 ? "0" : value.toPrecision(3);
};
const seconds = (value) => {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${digits(value * 1e6)} µs`;
  if (size < 1) return `${digits(value * 1e3)} ms`;
  return size < 100 ? `${digits(value)} s` : duration(value);
};
const duration = (value) => {
  if (!isNumber(value)) return "–";
  const total = Math.max(0, Math.round(value));
  const [days, hours, minutes] = [Math.floor(total / 86400), Math.floor(total / 3600) % 24, Math.floor(total / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${total % 60} s` : `${total} s`;
};
const bytes = (value) => {
  if (!isNumber(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < units.length - 1) { value /= 1024; unit++; }
  return `${unit === 0 ? whole(value) : digits(value)} ${units[unit]}`;
};
const plain = (text) => text.replace(/(\d)\.0+(?= |$)/, "$1").replace(/(\.\d*?[1-9])0+(?= |$)/, "$1");  // of ticks
const count = (value) => {
  if (!isNumber(value)) return "–";
  if (value < 1e4) return whole(value);
  const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [size, unit] = units.find(([size]) => value >= size);
  return `${digits(value / size)} ${unit}`;
};
const percent = (share) => (isNumber(share) ? `${share >= 0.0995 ? whole(100 * share) : (100 * share).toFixed(share >= 0.01 ? 1 : 2)} %` : "–");
