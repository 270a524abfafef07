// Talks to the server: adds the API key, asks for it on 401, reads server-sent events.
// Knows no endpoint and draws nothing but the key's dialog.

const KEY = "ropeway-api-key";

export class KeyRefused extends Error {}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** fetch with the key. A 401 asks for a key and tries again; KeyRefused if the user has none. */
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = new Headers(options.headers);
    if (key !== null) headers.set("Authorization", `Bearer ${key}`);
    const reply = await fetch(path, { ...options, headers });
    if (reply.status !== 401) return reply;
    if (sessionStorage.getItem(KEY) === key) await askForKey(key !== null);
  }
}

/** The reply's JSON; ApiError carries the server's own words. */
export async function requestJson(path, options) {
  const reply = await request(path, options);
  if (!reply.ok) throw await errorOf(reply);
  return reply.json();
}

export async function errorOf(reply) {
  const text = await reply.text();
  try {
    return new ApiError(reply.status, JSON.parse(text).error.message);
  } catch {
    return new ApiError(reply.status, `${reply.status} ${reply.statusText}: ${text.slice(0, 200)}`);
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

let asking = null;

/** One dialog, whoever asks; resolves once there is a key to try. */
function askForKey(wasWrong) {
  asking ??= showKeyDialog(wasWrong).finally(() => { asking = null; });
  return asking;
}

function showKeyDialog(wasWrong) {
  const dialog = document.getElementById("key-dialog");
  const input = document.getElementById("key");
  document.getElementById("key-text").textContent = wasWrong
    ? "The server did not accept that key."
    : "It stays in this tab and goes to this server only.";
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve, reject) => {
    document.getElementById("key-cancel").onclick = () => dialog.close();
    document.getElementById("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, input.value.trim());
      dialog.close("given");
    };
    dialog.onclose = () => (dialog.returnValue === "given" ? resolve() : reject(new KeyRefused("no API key given")));
  });
}

/** Server-sent events of a reply: { event, data } in order, data as text. Comments are left out. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const parsed = parseEvent(block);
      if (parsed.data !== "") yield parsed;
    }
  }
}

function parseEvent(block) {
  const data = [];
  let event = "message";
  for (const line of block.split("\n")) {
    if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (line.startsWith("event:")) event = line.slice(6).trim();
  }
  return { event, data: data.join("\n") };
}
