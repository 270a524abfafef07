// Starts the page: one stream feeds the map, the table and the charts; the playground stands beside it.
// Wires parts together and knows the endpoints; each part knows its own job only.

import { KeyRefused, errorOf, events, request, requestJson } from "./api.js";
import { Charts, Series } from "./charts.js";
import { Playground } from "./chat.js";
import { bytes, number, percent, seconds } from "./format.js";
import { LatencyWatch } from "./latency.js";
import { PageMap, summaryOf } from "./map.js";
import { Pool } from "./state.js";
import { RequestTable } from "./table.js";
import { setUpTheme } from "./theme.js";

const byId = (id) => document.getElementById(id);
const RETRY_MS = [300, 600, 1200, 2500, 5000];
const TABLE_EVERY_MS = 250;
const METRICS_EVERY = 5; // seconds
const SPEED_OVER = 3; // seconds: one step more or less in a second would make the number dance
const WAIT_SHOWN_AFTER_MS = 700;

const pool = new Pool();
const playground = new Playground();
const map = new PageMap(pool, byId("cells"), byId("tip"), byId("spoken"), pick);
const table = new RequestTable(pool, byId("requests"), pick);
pool.nameOf = (id) => (id === null ? "another key’s request" : playground.owns(id) ? "this chat" : shortName(id));

const series = {
  active: new Series("held", "--series-1"), cached: new Series("cached", "--series-2"),
  running: new Series("running", "--series-1"), waiting: new Series("waiting", "--series-3"),
  output: new Series("output", "--series-1"), prompt: new Series("prompt", "--series-4"),
  firstToken: new Series("first p95", "--series-3"), nextToken: new Series("next p50", "--series-1"),
};
const charts = new Charts(byId("charts"), [
  { title: "Pool", series: [series.active, series.cached], show: percent, max: 1 },
  { title: "Requests", series: [series.running, series.waiting], show: number },
  { title: "Tokens a second", series: [series.output, series.prompt], show: number },
  { title: "Latency", series: [series.firstToken, series.nextToken], show: seconds, log: true },
]);
const latency = new LatencyWatch();

const shortName = (id) => (id.length > 18 ? `${id.slice(0, 17)}…` : id);

function pick(id) {
  map.select(id);
  table.select(id);
}

// ---- the stream, for ever

async function follow() {
  for (let attempt = 0; ; attempt += 1) {
    try {
      await connect(() => { attempt = 0; });
      showConnection("lost", "reconnecting");
    } catch (error) {
      if (error instanceof KeyRefused) await untilKeyWanted();
      else showConnection("lost", await reasonOf(error));
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(attempt, RETRY_MS.length - 1)]));
  }
}

async function connect(onLive) {
  const { data } = await requestJson("/v1/models");
  playground.useModel(data[0]);
  byId("model").textContent = data[0].id;
  const reply = await request("/kv/stream", { headers: { Accept: "text/event-stream" } });
  if (!reply.ok) throw await errorOf(reply);
  showConnection("live", "live");
  onLive();
  for await (const { event, data } of events(reply)) receive(event, data);
}

/** A server that starts says what it is busy with. */
async function reasonOf(error) {
  if (error.status !== 503) return error.status ? error.message : "server unreachable, reconnecting";
  try {
    const { phase, detail } = await (await fetch("/startupz")).json();
    return phase === "ready" ? error.message : `starting: ${phase} ${detail}`;
  } catch {
    return error.message;
  }
}

function untilKeyWanted() {
  showConnection("lost", "enter API key");
  return new Promise((resolve) => byId("connection").addEventListener("click", resolve, { once: true }));
}

function showConnection(state, text) {
  byId("connection").dataset.state = state;
  byId("connection").textContent = text;
}

// ---- from an event to the screen: folded at once, drawn once a frame

let layoutIsOld = false;
let frameAsked = false;
let spent = 0; // ms of scripting since the last frame
let tableDrawn = 0;
let waitsSince = Infinity;

function receive(event, data) {
  if (data === "[DONE]") return;
  const start = performance.now();
  layoutIsOld = pool.take(event, JSON.parse(data)) || layoutIsOld;
  if (!frameAsked) requestAnimationFrame(frame);
  frameAsked = true;
  spent += performance.now() - start;
}

/** Draws what is new and says what it cost, for whoever measures. */
function frame() {
  const start = performance.now();
  frameAsked = false;
  if (layoutIsOld) map.layOut();
  else map.update();
  layoutIsOld = false;
  showVitals();
  if (start - tableDrawn >= TABLE_EVERY_MS) drawTable(start);
  document.dispatchEvent(new CustomEvent("ropeway:update", { detail: spent + performance.now() - start }));
  spent = 0;
}

function drawTable(now) {
  tableDrawn = now;
  table.update();
  playground.showHeld(pool);
  if (map.selected !== null && pool.slotOf(map.selected) === undefined) pick(null);
}

function showVitals() {
  const { stats, counts } = pool;
  if (stats === null) return;
  write("vital-running", number(stats.running));
  write("vital-waiting", number(stats.waiting));
  write("vital-pages", percent(counts.active / counts.total));
  write("map-summary", `${summaryOf(counts)} · ${bytes(stats.bytes.active)} of ${bytes(pool.poolBytes())}`);
  showBanner();
}

/** Only for waits that last: between arrival and admission everybody waits a moment. */
function showBanner() {
  if (pool.stats.waiting === 0) waitsSince = Infinity;
  else waitsSince = Math.min(waitsSince, performance.now());
  const lasts = performance.now() - waitsSince > WAIT_SHOWN_AFTER_MS;
  if (lasts) write("banner", pool.whyWaiting());
  byId("banner").hidden = !lasts;
}

function write(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

// ---- once a second: charts, and rows that tick while no event comes

const counted = []; // the last readings of the token counters
let beats = 0;

function beat() {
  const { stats, counts } = pool;
  const isLive = byId("connection").dataset.state === "live" && stats !== null;
  const now = performance.now();
  const speed = isLive ? speedOf(stats, now) : { output: null, prompt: null };
  series.active.push(isLive ? counts.active / counts.total : null);
  series.cached.push(isLive ? counts.cached / counts.total : null);
  series.running.push(isLive ? stats.running : null);
  series.waiting.push(isLive ? stats.waiting : null);
  series.output.push(speed.output);
  series.prompt.push(speed.prompt);
  if (isLive && beats % METRICS_EVERY === 0 && !document.hidden) latency.read();
  series.firstToken.push(isLive ? latency.firstToken : null);
  series.nextToken.push(isLive ? latency.nextToken : null);
  write("vital-speed", speed.output === null ? "–" : number(speed.output));
  if (!document.hidden) charts.draw();
  if (!document.hidden && isLive) {
    drawTable(now);
    showBanner();
  }
  beats += 1;
}

/** Tokens a second over the last readings; null after a gap or a restart. */
function speedOf(stats, now) {
  const latest = { now, output: stats.generation_tokens, prompt: stats.prompt_tokens };
  const last = counted.at(-1);
  if (last && (now - last.now > 3000 || latest.output < last.output)) counted.length = 0;
  counted.push(latest);
  if (counted.length > SPEED_OVER + 1) counted.shift();
  const rate = (name) => (1000 * (latest[name] - counted[0][name])) / (now - counted[0].now);
  return counted.length < 2 ? { output: null, prompt: null } : { output: rate("output"), prompt: rate("prompt") };
}

// ---- panes and theme

for (const button of document.querySelectorAll("#tabs button")) {
  button.addEventListener("click", () => {
    document.body.dataset.pane = button.dataset.pane;
    for (const other of document.querySelectorAll("#tabs button")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  });
}

setUpTheme(byId("theme"), () => {
  map.readColours();
  map.layOut();
  map.drawAll();
  charts.draw();
});
setInterval(beat, 1000);
charts.draw();
follow();
