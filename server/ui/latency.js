// Latency of the last seconds from the server's histograms: the difference of two readings of /metrics.
// Knows Prometheus text and two names, nothing of the page.

import { request } from "./api.js";

const FIRST = "vllm:time_to_first_token_seconds";
const NEXT = "vllm:inter_token_latency_seconds";

export class LatencyWatch {
  constructor() {
    this.firstToken = null;
    this.nextToken = null;
    this.last = null;
  }

  async read() {
    try {
      const reply = await request("/metrics");
      if (!reply.ok) return;
      const now = bucketsOf(await reply.text());
      this.firstToken = quantile(now[FIRST], this.last?.[FIRST], 0.95);
      this.nextToken = quantile(now[NEXT], this.last?.[NEXT], 0.5);
      this.last = now;
    } catch {
      this.last = this.firstToken = this.nextToken = null; // the stream reports lost servers; a gap is enough here
    }
  }
}

/** name -> [[upper bound in seconds, cumulative count]] */
function bucketsOf(text) {
  const found = { [FIRST]: [], [NEXT]: [] };
  for (const [, name, bound, count] of text.matchAll(/^([\w:]+)_bucket\{.*le="([^"]+)".*\} (\S+)$/gm)) {
    found[name]?.push([bound === "+Inf" ? Infinity : Number(bound), Number(count)]);
  }
  return found;
}

/** Linear inside the bucket, as Prometheus does it; null when nothing was observed in between. */
function quantile(now, before, q) {
  if (before === undefined) return null;
  const counts = now.map(([, count], index) => count - (before[index]?.[1] ?? 0));
  const wanted = q * (counts.at(-1) ?? 0);
  if (!(wanted > 0)) return null;
  const index = counts.findIndex((count) => count >= wanted);
  const low = index === 0 ? 0 : now[index - 1][0];
  const below = index === 0 ? 0 : counts[index - 1];
  if (now[index][0] === Infinity) return low;
  return low + ((now[index][0] - low) * (wanted - below)) / (counts[index] - below);
}
