// Small line charts of the last five minutes, drawn on canvases once a second; one pointer reads all of them.
// Knows series of numbers, not where they come from.

import { colour, fitCanvas } from "./theme.js";

export const SPAN = 300; // samples, one a second
const HEIGHT = 96;
const GUTTER = 46; // room of the axis labels, left

/** A ring of one value a second; null is a gap. */
export class Series {
  constructor(name, tint) {
    this.name = name;
    this.tint = tint;
    this.values = [];
  }

  push(value) {
    this.values.push(value);
    if (this.values.length > SPAN) this.values.shift();
  }
}

export class Charts {
  /** specs: [{ title, series, show(value), log, max }] */
  constructor(parent, specs) {
    this.charts = specs.map((spec) => makeChart(parent, spec));
    this.age = null; // samples back from now, under the pointer
    for (const { canvas } of this.charts) {
      canvas.addEventListener("pointermove", (event) => this.read(canvas, event.offsetX));
      canvas.addEventListener("pointerleave", () => this.read(canvas, null));
    }
    new ResizeObserver(() => this.draw()).observe(parent);
  }

  read(canvas, x) {
    const step = (canvas.clientWidth - GUTTER) / (SPAN - 1);
    const age = x === null ? null : Math.round((canvas.clientWidth - x) / step);
    this.age = age === null || age < 0 || age >= SPAN ? null : age;
    this.draw();
  }

  draw() {
    const style = { ink: colour("--dim"), line: colour("--line") };
    for (const chart of this.charts) drawChart(chart, this.age, style);
  }
}

function makeChart(parent, spec) {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const title = document.createElement("b");
  title.textContent = spec.title;
  caption.append(title);
  const readings = spec.series.map((series) => {
    const key = document.createElement("span");
    const reading = document.createElement("b");
    key.className = "key";
    key.style.setProperty("--tint", `var(${series.tint})`);
    key.append(`${series.name} `, reading);
    caption.append(key);
    return reading;
  });
  const canvas = document.createElement("canvas");
  canvas.setAttribute("role", "img");
  figure.append(caption, canvas);
  parent.append(figure);
  return { ...spec, canvas, context: canvas.getContext("2d"), readings };
}

function drawChart(chart, age, style) {
  const { canvas, context } = chart;
  const width = canvas.clientWidth;
  if (width === 0) return;
  fitCanvas(canvas, context, width, HEIGHT);
  context.clearRect(0, 0, width, HEIGHT);
  const scale = scaleOf(chart);
  drawAxis(context, chart, scale, width, style);
  for (const series of chart.series) drawLine(context, series, scale, width);
  if (age !== null) drawPointer(context, width, age, style);
  showReadings(chart, age ?? 0);
}

/** value -> y. Logarithmic where asked, since a first token takes a hundred times a next one. */
function scaleOf({ series, log, max }) {
  const values = series.flatMap(({ values }) => values).filter((value) => value !== null);
  const top = niceAbove(max ?? Math.max(...values, log ? 0.1 : 1));
  if (!log) return { low: 0, top, y: (value) => HEIGHT - 4 - (value / top) * (HEIGHT - 12) };
  const low = 10 ** Math.floor(Math.log10(Math.max(1e-4, Math.min(...values, top / 10))));
  const span = Math.log10(top / low);
  return { low, top, y: (value) => HEIGHT - 4 - (Math.log10(Math.max(low, value) / low) / span) * (HEIGHT - 12) };
}

function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value * 0.999) * power;
}

function drawAxis(context, { show, log }, { low, top, y }, width, style) {
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of [low, log ? Math.sqrt(low * top) : top / 2, top]) {
    const height = Math.round(y(value)) + 0.5;
    context.fillStyle = style.line;
    context.fillRect(GUTTER, height - 0.5, width - GUTTER, 1);
    context.fillStyle = style.ink;
    context.fillText(show(value), GUTTER - 6, Math.max(7, Math.min(HEIGHT - 7, height)));
  }
}

function drawLine(context, { values, tint }, { y }, width) {
  const step = (width - GUTTER) / (SPAN - 1);
  context.strokeStyle = colour(tint);
  context.lineWidth = 1.6;
  context.lineJoin = "round";
  context.beginPath();
  let pen = false;
  values.forEach((value, index) => {
    if (value === null) {
      pen = false;
      return;
    }
    const x = width - (values.length - 1 - index) * step - 1;
    if (pen) context.lineTo(x, y(value));
    else context.moveTo(x - 0.5, y(value));
    if (!pen) context.lineTo(x, y(value));
    pen = true;
  });
  context.stroke();
}

function drawPointer(context, width, age, style) {
  const x = width - age * ((width - GUTTER) / (SPAN - 1));
  context.fillStyle = style.ink;
  context.fillRect(Math.round(x) - 1, 0, 1, HEIGHT);
}

function showReadings({ canvas, readings, series, show, title }, age) {
  const texts = series.map(({ values }) => {
    const value = values.at(-1 - age) ?? null;
    return value === null ? "–" : show(value);
  });
  texts.forEach((text, index) => {
    if (readings[index].textContent !== text) readings[index].textContent = text;
  });
  const words = series.map(({ name }, index) => `${name} ${texts[index]}`).join(", ");
  canvas.setAttribute("aria-label", `${title}: ${words}${age > 0 ? `, ${age} s ago` : ""}`);
}
