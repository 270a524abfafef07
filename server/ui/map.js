// The page pool on a canvas: one cell a page, redrawn only where something changed; pointer and keys pick cells.
// Knows the pool's state, not how it came here.

import { ACTIVE, CACHED, FREE } from "./state.js";
import { bytes, number, plural, seconds } from "./format.js";
import { colour, fitCanvas } from "./theme.js";

const GAP_BETWEEN_GROUPS = 14;
const PITCH = [22, 5]; // CSS pixels from cell to cell, at most and at least
const SHARE = 0.55; // of the pane's height, before cells shrink
const KEYS = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: "up", ArrowDown: "down", Home: "first", End: "last" };

export class PageMap {
  /** onPick(request id or null) is called when a cell is chosen. */
  constructor(pool, canvas, tip, spoken, onPick) {
    this.pool = pool;
    this.canvas = canvas;
    this.tip = tip;
    this.spoken = spoken; // live region: only keys write to it, or it would never be silent
    this.onPick = onPick;
    this.context = canvas.getContext("2d");
    this.selected = null;
    this.cursor = null; // the cell under pointer or keyboard
    this.columns = 1;
    this.pitch = 12;
    this.tops = [];
    this.readColours();
    new ResizeObserver(() => this.layOut()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.point(this.cellAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("focus", () => this.point(this.cursor ?? 0));
    canvas.addEventListener("click", (event) => this.click(this.cellAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("keydown", (event) => this.press(event));
  }

  readColours() {
    this.colours = {
      free: colour("--cell-free"), cached: colour("--cell-cached"), hole: colour("--panel"), cursor: colour("--ink"),
      other: colour("--cell-other"),
    };
    this.lightness = Number(getComputedStyle(document.documentElement).getPropertyValue("--cell-lightness")) || 0.7;
    this.palette = new Map();
  }

  /** Largest cells that keep the whole pool in view, then everything is drawn again. */
  layOut() {
    const width = this.canvas.parentElement.clientWidth;
    if (width === 0) return;
    const groups = this.pool.groups;
    const tallest = Math.max(120, SHARE * this.canvas.closest("section").clientHeight);
    this.pitch = PITCH[0] + 1;
    do {
      this.pitch -= 1;
      this.columns = Math.max(1, Math.floor(width / this.pitch));
    } while (this.pitch > PITCH[1] && this.heightOf(groups) > tallest);
    this.tops = [];
    let top = 0;
    for (const group of groups) {
      this.tops.push(top);
      top += Math.ceil(group.pages / this.columns) * this.pitch + GAP_BETWEEN_GROUPS;
    }
    Object.assign(this.canvas.dataset, { columns: this.columns, pitch: this.pitch });
    fitCanvas(this.canvas, this.context, width, Math.max(this.pitch, top - GAP_BETWEEN_GROUPS));
    this.drawAll();
  }

  heightOf(groups) {
    const rows = groups.reduce((sum, group) => sum + Math.ceil(group.pages / this.columns), 0);
    return rows * this.pitch + (groups.length - 1) * GAP_BETWEEN_GROUPS;
  }

  drawAll() {
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (let cell = 0; cell < this.pool.total; cell += 1) this.draw(cell);
    this.pool.dirty.clear();
  }

  /** Draws what changed since the last call. */
  update() {
    for (const cell of this.pool.dirty) this.draw(cell);
    const tipIsOld = this.cursor !== null && !this.tip.hidden;
    this.pool.dirty.clear();
    if (tipIsOld) this.showTip();
  }

  place(cell) {
    const group = this.pool.groupOf(cell);
    const index = cell - this.pool.groups[group].offset;
    return [(index % this.columns) * this.pitch, this.tops[group] + Math.floor(index / this.columns) * this.pitch];
  }

  draw(cell) {
    const { context, pitch, pool } = this;
    const [x, y] = this.place(cell);
    const size = pitch - (pitch > 9 ? 2 : 1);
    context.clearRect(x, y, pitch, pitch);
    const isChosen = this.selected !== null && pool.isHeldBy(cell, this.selected);
    if (this.selected !== null && !isChosen && pool.states[cell] !== FREE) context.globalAlpha = 0.16;
    if (pool.states[cell] === ACTIVE) {
      context.fillStyle = this.colourOf(isChosen ? this.selected : pool.holders[cell]?.[0]);
      context.fillRect(x, y, size, size);
      if (pool.references[cell] > 1) this.hole(x, y, size, this.colours.hole, 0.4);
    } else {
      context.fillStyle = pool.states[cell] === CACHED ? this.colours.cached : this.colours.free;
      context.fillRect(x, y, size, size);
      if (pool.states[cell] === CACHED) this.hole(x, y, size, this.colours.hole, 0.64);
    }
    context.globalAlpha = 1;
    if (cell === this.cursor) this.frame(x, y, size);
  }

  hole(x, y, size, style, share) {
    const inner = Math.max(1, Math.round(size * share));
    const edge = (size - inner) / 2;
    this.context.fillStyle = style;
    this.context.fillRect(x + edge, y + edge, inner, inner);
  }

  frame(x, y, size) {
    this.context.strokeStyle = this.colours.cursor;
    this.context.lineWidth = 2;
    this.context.strokeRect(x + 1, y + 1, size - 2, size - 2);
  }

  colourOf(id) {
    const slot = this.pool.slotOf(id);
    if (slot === undefined) return this.colours.other;
    if (!this.palette.has(slot)) this.palette.set(slot, slotColour(slot, this.lightness));
    return this.palette.get(slot);
  }

  select(id) {
    this.selected = id;
    this.drawAll();
  }

  // ---- pointer and keys

  cellAt(x, y) {
    const group = this.tops.findLastIndex((top) => y >= top);
    const column = Math.floor(x / this.pitch);
    if (group < 0 || column >= this.columns) return null;
    const index = Math.floor((y - this.tops[group]) / this.pitch) * this.columns + column;
    const { offset, pages } = this.pool.groups[group];
    return index < pages ? offset + index : null;
  }

  point(cell) {
    const before = this.cursor;
    this.cursor = cell !== null && cell < this.pool.total ? cell : null;
    if (before !== null && before !== this.cursor && before < this.pool.total) this.draw(before);
    this.tip.hidden = this.cursor === null;
    if (this.cursor === null) return;
    this.draw(this.cursor);
    this.showTip();
  }

  /** A finger does not hover: its tap shows what the pointer would. */
  click(cell) {
    this.point(cell);
    this.pick(cell);
  }

  pick(cell) {
    const holder = cell === null ? undefined : this.pool.holders[cell]?.[0];
    this.onPick(holder === undefined || holder === this.selected ? null : holder);
  }

  press(event) {
    if (event.key === "Escape") this.onPick(null);
    if (event.key === "Enter") this.pick(this.cursor);
    const move = KEYS[event.key];
    if (move === undefined || this.pool.total === 0) return;
    event.preventDefault();
    const from = this.cursor ?? 0;
    const targets = { up: from - this.columns, down: from + this.columns, first: 0, last: this.pool.total - 1 };
    const to = typeof move === "number" ? from + move : targets[move];
    this.point(Math.max(0, Math.min(this.pool.total - 1, to)));
    this.spoken.textContent = this.tip.textContent;
  }

  showTip() {
    const [x, y] = this.place(this.cursor);
    const { left, top } = this.canvas.getBoundingClientRect();
    this.tip.textContent = this.describe(this.cursor);
    const below = top + y + this.pitch + 4;
    const fits = below + this.tip.offsetHeight < innerHeight;
    this.tip.style.left = `${Math.max(8, Math.min(left + x, innerWidth - this.tip.offsetWidth - 8))}px`;
    this.tip.style.top = `${fits ? below : top + y - this.tip.offsetHeight - 4}px`;
  }

  describe(cell) {
    const { pool } = this;
    const group = pool.groupOf(cell);
    const { offset, pageBytes } = pool.groups[group];
    const place = pool.groups.length > 1 ? ` of group ${group}` : "";
    const lines = [`page ${cell - offset + 1}${place} · ${bytes(pageBytes)}`];
    const names = [...new Set(pool.holders[cell] ?? [])].map((id) => pool.nameOf(id));
    if (pool.states[cell] === ACTIVE) {
      lines.push(`held by ${names.slice(0, 4).join(", ") || "another key"}${names.length > 4 ? ` and ${names.length - 4} more` : ""}`);
    } else lines.push(pool.states[cell] === CACHED ? "cached: kept for prompts that begin alike" : "free");
    const age = pool.ageOf(cell);
    const facts = [age === null ? "" : `for ${seconds(age)}`, `${plural(pool.references[cell], "reference")}`,
      `${plural(pool.hits[cell], "hit")}`];
    if (pool.states[cell] !== FREE) lines.push(facts.filter(Boolean).join(" · "));
    return lines.join("\n");
  }
}

/** Neighbouring slots lie far apart on the wheel; every other turn is a shade deeper. */
export function slotColour(slot, lightness) {
  const hue = (slot * 137.508 + 195) % 360;
  const depth = lightness - 0.09 * (slot % 3 === 2);
  return `oklch(${depth.toFixed(2)} 0.125 ${hue.toFixed(1)})`;
}

export const summaryOf = (counts) =>
  `${number(counts.total)} pages: ${number(counts.active)} held, ${number(counts.cached)} cached, ${number(counts.free)} free`;
