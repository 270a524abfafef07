// The page pool as the server's stream tells it: a snapshot, then deltas, folded into pages and request rows.
// The one module that knows the stream's shape. Draws nothing.

export const FREE = 0;
export const ACTIVE = 1;
export const CACHED = 2;

const NOBODY = [];

export class Pool {
  constructor() {
    this.skew = 0; // this clock less the server's, in ms
    this.nameOf = (id) => id;
    this.reset([]);
  }

  /** sizes: pages and bytes of a page, a group; scratch pages are not on the map. */
  reset(sizes) {
    let offset = 0;
    this.groups = sizes.map((size) => {
      const group = { ...size, offset };
      offset += size.pages;
      return group;
    });
    this.total = offset;
    this.states = new Uint8Array(offset);
    this.references = new Int32Array(offset);
    this.hits = new Uint32Array(offset);
    this.since = new Float64Array(offset); // ms of the server's epoch, 0: never used
    this.holders = new Array(offset).fill(null); // ids, one a reference (null: another key's request), or null
    this.dirty = new Set();
    this.requests = new Map(); // key -> row
    this.slots = new Map(); // request id -> number of its colour
    this.freeSlots = [];
    this.stats = null;
    this.counts = { total: offset, active: 0, cached: 0, free: offset };
  }

  // ---- what the stream says

  /** One event of /kv/stream: snapshot, delta or requests. True if everything has to be laid out again. */
  take(event, message) {
    if (event === "requests") {
      this.takeRequests(message.requests);
      return false;
    }
    const isSnapshot = event === "snapshot";
    if (isSnapshot) this.reset(sizesOf(message));
    this.skew = Date.now() - message.time_ms;
    this.takeStats(message.stats);
    if (message.groups) this.takePages(message.groups, message.held_by);
    return isSnapshot;
  }

  takeStats(stats) {
    this.stats = stats;
    this.counts = { total: this.total, ...stats.pages };
  }

  /** runs: [first page, count, references (-1: kept), index into heldBy (-1: nobody), hits, since]. */
  takePages(groups, heldBy) {
    for (const { group, runs } of groups) {
      const { offset } = this.groups[group];
      for (const [page, count, references, holder, hits, since] of runs) {
        const ids = holder < 0 ? null : heldBy[holder];
        const state = references > 0 ? ACTIVE : references < 0 ? CACHED : FREE;
        const first = offset + page - 1;
        for (let cell = first; cell < first + count; cell += 1) {
          this.states[cell] = state;
          this.references[cell] = Math.max(0, references);
          this.holders[cell] = ids;
          this.hits[cell] = hits;
          this.since[cell] = since;
          this.dirty.add(cell);
        }
        if (ids !== null) for (const id of ids) this.claimSlot(id);
      }
    }
  }

  takeRequests(rows) {
    const at = performance.now();
    this.requests = new Map(rows.map((row) => [`${row.id} ${row.choice}`, rowOf(row, at)]));
    for (const { id } of rows) this.claimSlot(id);
    this.releaseSlots(new Set(rows.map(({ id }) => id)));
  }

  // ---- colours: the lowest free number, so that few requests have few and distant hues

  claimSlot(id) {
    if (id === null || this.slots.has(id)) return;
    this.slots.set(id, this.freeSlots.length > 0 ? this.freeSlots.pop() : this.slots.size);
  }

  /** Who has no row and no page is gone. */
  releaseSlots(alive) {
    const gone = new Set([...this.slots.keys()].filter((id) => !alive.has(id)));
    if (gone.size > 0) for (const ids of this.holders) if (ids !== null) for (const id of ids) gone.delete(id);
    for (const id of gone) {
      this.freeSlots.push(this.slots.get(id));
      this.slots.delete(id);
    }
    this.freeSlots.sort((a, b) => b - a);
  }

  slotOf(id) {
    return this.slots.get(id);
  }

  // ---- what panes ask

  poolBytes() {
    return this.groups.reduce((sum, { pages, pageBytes }) => sum + pages * pageBytes, 0);
  }

  groupOf(cell) {
    let group = this.groups.length - 1;
    while (this.groups[group].offset > cell) group -= 1;
    return group;
  }

  isHeldBy(cell, id) {
    return (this.holders[cell] ?? NOBODY).includes(id);
  }

  /** Seconds that a page has been held, kept or free; null if it was never used. */
  ageOf(cell) {
    return this.since[cell] === 0 ? null : Math.max(0, (Date.now() - this.skew - this.since[cell]) / 1000);
  }

  /** Carried on from the last row: what it holds, for as long as it has not been heard of. */
  byteSecondsOf(row) {
    return row.byteSeconds + row.shareBytes * ((performance.now() - row.at) / 1000);
  }

  requestAge(row) {
    return row.age + (performance.now() - row.at) / 1000;
  }

  /** Why requests wait, in words; empty when none does. */
  whyWaiting() {
    const { waiting } = this.stats ?? { waiting: 0 };
    if (waiting === 0) return "";
    const { total, active } = this.counts;
    const who = waiting === 1 ? "1 request waits" : `${waiting} requests wait`;
    const left = total - active;
    if (left > total / 4) return `${who} for a place in the batch; pages are free (${left.toLocaleString("en")}).`;
    const biggest = [...this.requests.values()].reduce((most, row) => (row.pages > most.pages ? row : most), { pages: 0 });
    const room = left === 0 ? "no page of the pool is left" : `${left.toLocaleString("en")} of ${total.toLocaleString("en")} pages are left`;
    if (biggest.pages === 0) return `${who}: ${room}.`;
    return `${who}: ${room}; the biggest holder is ${this.nameOf(biggest.id)} with ${Math.round((100 * biggest.pages) / total)} % of them.`;
  }
}

/** The snapshot's runs cover every page of a group, from 1 on. */
function sizesOf({ groups, page_bytes: pageBytes }) {
  return groups.map(({ group, runs }) => {
    const [first, count] = runs.at(-1) ?? [1, 0];
    return { pages: first + count - 1, pageBytes: pageBytes[group] };
  });
}

function rowOf(row, at) {
  return {
    id: row.id, choice: row.choice, state: row.state, at, age: row.age_s,
    promptTokens: row.prompt_tokens, outputTokens: row.output_tokens, cachedTokens: row.cached_tokens,
    pages: row.pages, bytes: row.bytes, peakBytes: row.peak_bytes,
    shareBytes: row.share_weighted_bytes, byteSeconds: row.byte_seconds,
  };
}
