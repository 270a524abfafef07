// The playground: a conversation streamed from /v1/chat/completions, with its speed and its share of the context.
// Text only ever becomes text nodes. Knows nothing of pages.

import { KeyRefused, errorOf, events, hasKey, request } from "./api.js";
import { byteSeconds, bytes, number, seconds } from "./format.js";

const PATH = "/v1/chat/completions";
const byId = (id) => document.getElementById(id);

export class Playground {
  constructor() {
    this.messages = [];
    this.model = null;
    this.contextLimit = null;
    this.running = null; // AbortController of the reply that streams
    this.lastId = null;
    byId("composer").addEventListener("submit", (event) => this.submit(event));
    byId("prompt").addEventListener("keydown", (event) => this.key(event));
    byId("chat-clear").addEventListener("click", () => this.clear());
    byId("chat-curl").addEventListener("click", () => this.showCurl());
    byId("curl-close").addEventListener("click", () => byId("curl-dialog").close());
    byId("curl-copy").addEventListener("click", copyCurl);
    this.clear();
  }

  useModel({ id, max_model_len: limit }) {
    this.model = id;
    this.contextLimit = limit ?? null;
    this.showContext(0);
  }

  owns(id) {
    return this.lastId !== null && id.startsWith(this.lastId);
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  }

  submit(event) {
    event.preventDefault();
    if (this.running) {
      this.running.abort();
      return;
    }
    const text = byId("prompt").value;
    if (text.trim() === "") return;
    byId("prompt").value = "";
    byId("messages").querySelector(".hint")?.remove();
    this.messages.push({ role: "user", content: text });
    addMessage("user", text);
    this.answer();
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    const hint = document.createElement("p");
    hint.className = "hint dim";
    hint.textContent = "Ask something. Watch its pages light up on the map while it answers.";
    byId("messages").replaceChildren(hint);
    this.showContext(0);
    for (const id of ["fact-speed", "fact-first", "fact-tokens", "fact-kv"]) byId(id).textContent = "–";
  }

  /** The body of the request for the conversation so far: empty fields are left to the server. */
  body() {
    const form = new FormData(byId("parameters"));
    const system = form.get("system").trim();
    const stop = form.get("stop").split("\n").filter((line) => line !== "");
    const body = { model: this.model, messages: [...this.messages], stream: true, stream_options: { include_usage: true } };
    if (this.model === null) delete body.model;
    if (system !== "") body.messages.unshift({ role: "system", content: system });
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
      if (form.get(name) !== "") body[name] = Number(form.get(name));
    }
    if (stop.length > 0) body.stop = stop;
    return body;
  }

  async answer() {
    const conversation = this.messages;
    const bubble = addMessage("assistant", "");
    const text = bubble.appendChild(document.createTextNode(""));
    this.running = new AbortController();
    this.lastId = `page-${crypto.getRandomValues(new Uint32Array(1))[0].toString(16)}`;
    bubble.classList.add("streaming");
    byId("send").textContent = "Stop";
    try {
      await this.stream(text);
    } catch (error) {
      explain(bubble, error);
    } finally {
      bubble.classList.remove("streaming");
      byId("send").textContent = "Send";
      this.running = null;
      if (text.data !== "") conversation.push({ role: "assistant", content: text.data });
      else conversation.pop();
    }
  }

  async stream(text) {
    const clock = new Clock();
    const reply = await request(PATH, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Request-Id": this.lastId },
      body: JSON.stringify(this.body()),
      signal: this.running.signal,
    });
    if (!reply.ok) throw await errorOf(reply);
    for await (const { data } of events(reply)) {
      if (data === "[DONE]") break;
      this.take(JSON.parse(data), text, clock);
    }
  }

  take(chunk, text, clock) {
    if (chunk.error) throw new Error(chunk.error.message);
    const piece = chunk.choices?.[0]?.delta?.content ?? "";
    if (piece !== "") {
      clock.tick();
      const log = byId("messages");
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      text.data += piece;
      if (follows) log.scrollTop = log.scrollHeight;
    }
    if (chunk.usage) {
      clock.tokens = chunk.usage.completion_tokens;
      this.showContext(chunk.usage.total_tokens);
    }
    clock.show();
  }

  /** What the reply that streams holds now. The last word stays when it is over. */
  showHeld(pool) {
    if (!this.running) return;
    const row = [...pool.requests.values()].find(({ id }) => this.owns(id));
    if (row === undefined) return;
    this.showContext(row.promptTokens + row.outputTokens);
    byId("fact-kv").textContent = `${bytes(row.bytes)}, ${byteSeconds(pool.byteSecondsOf(row))}`;
  }

  showContext(tokens) {
    const limit = this.contextLimit;
    byId("context").value = limit ? tokens / limit : 0;
    byId("fact-context").textContent = limit ? `${number(tokens)} of ${number(limit)}` : number(tokens);
  }

  showCurl() {
    byId("curl-text").value = curlOf(this.body());
    byId("curl-copy").textContent = "Copy";
    byId("curl-dialog").showModal();
  }
}

/** Speed of one reply. A chunk counts as a token until the server's own count arrives at the end. */
class Clock {
  constructor() {
    this.start = performance.now();
    this.first = this.last = null;
    this.tokens = 0;
  }

  tick() {
    this.last = performance.now();
    this.first ??= this.last;
    this.tokens += 1;
  }

  show() {
    if (this.first === null) return;
    const elapsed = (this.last - this.first) / 1000;
    byId("fact-first").textContent = seconds((this.first - this.start) / 1000);
    byId("fact-tokens").textContent = number(this.tokens);
    byId("fact-speed").textContent = elapsed > 0 ? ((this.tokens - 1) / elapsed).toFixed(1) : "–";
  }
}

function addMessage(role, content) {
  const bubble = document.createElement("div");
  bubble.className = `message ${role}`;
  bubble.setAttribute("aria-label", role === "user" ? "You" : "Model");
  bubble.textContent = content;
  const log = byId("messages");
  log.append(bubble);
  log.scrollTop = log.scrollHeight;
  return bubble;
}

/** What went wrong, in the reply's place; a stop that was asked for is no error. */
function explain(bubble, error) {
  const note = document.createElement("span");
  note.className = "note";
  if (error.name === "AbortError") note.textContent = "stopped";
  else if (error instanceof KeyRefused) note.textContent = "not sent: the server asks for an API key";
  else note.textContent = error instanceof TypeError ? "the connection to the server broke" : error.message;
  if (error.name !== "AbortError") bubble.classList.add("failed");
  bubble.append(note);
}

function curlOf(body) {
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [`curl -N ${location.origin}${PATH}`, "-H 'Content-Type: application/json'"];
  if (hasKey()) lines.push('-H "Authorization: Bearer $ROPEWAY_API_KEY"');
  return [...lines, `-d ${quote(JSON.stringify(body))}`].join(" \\\n  ");
}

/** The clipboard is closed to pages over plain http from afar: then the text stays selected for the user's own copy. */
async function copyCurl() {
  const area = byId("curl-text");
  area.select();
  try {
    await navigator.clipboard.writeText(area.value);
    byId("curl-copy").textContent = "Copied";
  } catch {
    byId("curl-copy").textContent = "Press Ctrl+C";
    area.focus();
  }
}
