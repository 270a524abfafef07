// One row a request: tokens, pages, bytes and byte-seconds that tick. Writes only cells whose text changed.
// Knows the pool's state; choosing a row is told to its owner.

import { byteSeconds, bytes, number, seconds } from "./format.js";
import { slotColour } from "./map.js";

const ROW_HEIGHT = 30; // pixels, as in style.css
const COLUMNS = 10;
const SWATCH_LIGHTNESS = 0.66; // of the style sheet's cells
const SLACK = 4; // rows kept fresh above and below the view

export class RequestTable {
  constructor(pool, frame, onPick) {
    this.pool = pool;
    this.frame = frame;
    this.body = frame.querySelector("tbody");
    this.idle = frame.querySelector("#idle");
    this.onPick = onPick;
    this.rows = new Map(); // key -> { element, button, targets, texts }
    this.selected = null;
    this.view = [0, 50];
    frame.addEventListener("scroll", () => this.measure(), { passive: true });
    new ResizeObserver(() => this.measure()).observe(frame);
    this.body.addEventListener("click", (event) => this.pick(event.target.closest("tr")));
  }

  measure() {
    const first = Math.floor(this.frame.scrollTop / ROW_HEIGHT);
    this.view = [first - SLACK, first + Math.ceil(this.frame.clientHeight / ROW_HEIGHT) + SLACK];
  }

  pick(element) {
    if (element) this.onPick(element.dataset.id === this.selected ? null : element.dataset.id);
  }

  select(id) {
    this.selected = id;
    for (const row of this.rows.values()) mark(row, row.element.dataset.id === id);
  }

  /** Rows come and go; those in view get their new numbers. */
  update() {
    const requests = this.pool.requests;
    for (const [key, row] of this.rows) {
      if (requests.has(key)) continue;
      row.element.remove();
      this.rows.delete(key);
    }
    let index = 0;
    for (const [key, request] of requests) {
      if (!this.rows.has(key)) this.add(key, request);
      if (index >= this.view[0] && index <= this.view[1]) this.write(this.rows.get(key), request);
      index += 1;
    }
    this.idle.hidden = requests.size > 0;
  }

  add(key, request) {
    const element = document.createElement("tr");
    const cells = Array.from({ length: COLUMNS }, () => element.appendChild(document.createElement("td")));
    const button = cells[0].appendChild(document.createElement("button"));
    const swatch = button.appendChild(document.createElement("i"));
    const name = button.appendChild(document.createElement("span"));
    element.dataset.id = request.id;
    button.type = "button";
    button.title = request.id;
    swatch.className = "swatch";
    swatch.style.background = slotColour(this.pool.slotOf(request.id), SWATCH_LIGHTNESS);
    const row = { element, button, targets: [name, ...cells.slice(1)], texts: [] };
    mark(row, request.id === this.selected);
    this.body.append(element);
    this.rows.set(key, row);
  }

  write({ element, targets, texts }, request) {
    const now = this.textsOf(request);
    now.forEach((text, index) => {
      if (texts[index] === text) return;
      texts[index] = text;
      targets[index].textContent = text;
    });
    if (element.dataset.state !== request.state) element.dataset.state = request.state;
  }

  textsOf(request) {
    return [
      this.pool.nameOf(request.id) + (request.choice > 0 ? ` #${request.choice}` : ""),
      request.state,
      number(request.promptTokens),
      number(request.cachedTokens),
      number(request.outputTokens),
      number(request.pages),
      bytes(request.bytes),
      bytes(request.peakBytes),
      byteSeconds(this.pool.byteSecondsOf(request)),
      seconds(this.pool.requestAge(request)),
    ];
  }
}

function mark({ element, button }, isSelected) {
  element.classList.toggle("selected", isSelected);
  button.setAttribute("aria-pressed", String(isSelected));
}
