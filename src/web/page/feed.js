"use strict";
// What the page knows of the daemon: its stream of events, and the lists that it requests when they have changed.

// Captures whose memory of one GPU the page holds.
const MOST_ARCHIVED = 4;
// Jobs whose past is requested one by one.
const MOST_JOBS = 4;
// How often lists that no event announces are requested, milliseconds.
const LISTS_EVERY = 5000;

async function request(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.detail ?? answer.statusText);
  return body;
}

class Feed {
  // `changed` is called with the names of what has changed.
  constructor(changed) {
    Object.assign(this, { changed, originMs: null, now: 0, source: null, notice: null, trouble: null, state: "connecting" });
    Object.assign(this, { gpus: new Map(), ranks: new Ranks((from, to, shown) => this.timeline(from, to, shown)), findings: [], incidents: [], captures: { captures: [] }, jobs: [], lost: 0 });
    this.revision = null;
    this.connect();
    setInterval(() => { if (!document.hidden && this.originMs !== null) this.list(); }, LISTS_EVERY);
    // A page that nobody sees takes no connection: browsers have six for a server.
    document.addEventListener("visibilitychange", () => { if (document.hidden) this.disconnect(); else { this.connect(); this.list(); } });
  }

  // Seconds of the page of a Unix time in nanoseconds, and back.
  seconds(unixNs) { return (unixNs - this.originMs * 1e6) / 1e9; }
  unixNs(seconds) { return Math.round(this.originMs * 1e6 + seconds * 1e9); }

  connect() {
    if (this.stream) return;
    this.ranks.isNewStream = true;
    this.stream = new EventSource("api/v1/live");
    this.stream.onmessage = (event) => this.take(JSON.parse(event.data));
    this.stream.onerror = () => {
      this.ranks.isNewStream = true;
      this.set("disconnected");
      // After an answer that is no stream, as of a proxy whose server is gone, a browser does not try again.
      if (this.stream?.readyState !== EventSource.CLOSED) return;
      this.stream = null;
      setTimeout(() => { if (!document.hidden) this.connect(); }, RETRY_MS);
    };
  }

  disconnect() {
    this.stream?.close();
    this.stream = null;
    this.set("paused");
  }

  set(state) {
    if (this.state === state) return;
    this.state = state;
    this.changed("state");
  }

  take(update) {
    const isFirst = this.originMs === null;
    this.originMs ??= Math.floor(update.base_unix_nano / 1e6);
    const base = this.seconds(update.base_unix_nano), at = (us) => base + us / 1e6;
    Object.assign(this, { source: update.source, notice: update.notice, trouble: update.trouble });
    this.lost += update.lost;
    let newest = -Infinity;
    const present = new Set();
    for (const one of update.gpus) {
      present.add(one.uuid);
      const gpu = this.gpuOf(one.uuid);
      Object.assign(gpu, { gpu: one.gpu, up: one.up, utilization: one.utilization_ratio, power: one.power_watts,
        temperature: one.temperature_celsius, throttle: one.throttle });
      const { activity } = one;
      if (activity) gpu.activity.take(at(activity.at_us), [one.utilization_ratio, activity.sm, activity.tensor, activity.dram]);
      const until = one.until_us === null ? -Infinity : at(one.until_us);
      gpu.memory.take(one.points.map(([us, used]) => [at(us), used]), until, base);
      newest = Math.max(newest, until);
    }
    for (const uuid of this.gpus.keys()) if (!present.has(uuid)) this.gpus.delete(uuid);
    // Steps go on where no GPU answers.
    this.now = base - newest > SILENT ? base : newest;
    this.ranks.take(update, at);
    this.set("live");
    if (this.revision !== update.findings_revision) { this.revision = update.findings_revision; this.listFindings(); }
    if (isFirst) this.list().then(() => { this.isListed = true; this.changed("update"); });
    this.changed("update");
  }

  gpuOf(uuid) {
    if (!this.gpus.has(uuid)) {
      const load = async (from, to, points) => {
        const range = from === null ? "from=0" : `from=${this.unixNs(from)}&to=${this.unixNs(to)}`;
        const answer = await request(`api/v1/gpus/${encodeURIComponent(uuid)}/memory?${range}&max_points=${points}`);
        return this.curve(answer);
      };
      const past = async () => {
        const answer = await request(`api/v1/gpus/${encodeURIComponent(uuid)}/activity?from=0`);
        return answer.points.map(([at, ...shares]) => [this.seconds(at), ...shares]);
      };
      const held = async (from) => {
        const answer = await request(`api/v1/gpus/${encodeURIComponent(uuid)}/breakdown${from === null ? "" : `?from=${this.unixNs(from)}`}`);
        return answer.points.map(([at, ...parts]) => [this.seconds(at), ...parts]);
      };
      this.gpus.set(uuid, { uuid, memory: new Memory(load), activity: new LiveActivity(past), breakdown: new LiveBreakdown(held) });
    }
    return this.gpus.get(uuid);
  }

  // An answer's memory as a curve.
  curve(answer) {
    const times = Float64Array.from(answer.points, ([at]) => this.seconds(at));
    const used = Float64Array.from(answer.points, ([, bytes]) => bytes ?? NaN);
    return new Curve(times, used, this.seconds(answer.to_unix_nano), (answer.bucket_ns ?? 0) / 1e9);
  }

  // What a capture has of a GPU's memory; a request for each GPU and capture, once.
  async archive(gpu, { id, begin_unix_nano: begin, end_unix_nano: end }) {
    const { archive } = gpu.memory;
    // Only the last few views: each may have every reading of a minute.
    if (archive.size >= MOST_ARCHIVED) archive.delete(archive.keys().next().value);
    archive.set(id, { from: this.seconds(begin), to: this.seconds(end), curve: null });
    try {
      const answer = await request(`api/v1/captures/${encodeURIComponent(id)}/memory?gpu=${encodeURIComponent(gpu.uuid)}&max_points=100000`);
      archive.set(id, { from: this.seconds(answer.from_unix_nano), to: this.seconds(answer.to_unix_nano), curve: this.curve(answer) });
    } catch (error) { archive.set(id, { from: this.seconds(begin), to: this.seconds(end), curve: null, trouble: error.message }); }
  }

  // Captures that have something of an interval.
  capturesIn(from, to) {
    return this.captures.captures.filter(({ state, begin_unix_nano: begin, end_unix_nano: end }) => !["writing", "failed", "unreadable"].includes(state)
      && begin !== null && end !== null && this.seconds(begin) < to && this.seconds(end) > from);
  }

  // Steps and phases of an interval of the past. If an answer for all ranks leaves some out, those that are shown are requested once more,
  // a request for each job.
  async timeline(from, to, shown) {
    const range = `from=${this.unixNs(from)}&to=${this.unixNs(to)}`, jobs = new Map();
    for (const { id, rank } of shown) jobs.set(id, [...jobs.get(id) ?? [], rank]);
    const ask = async (query) => {
      const answer = await request(`api/v1/timeline?${query}`), base = this.seconds(answer.base_unix_nano), at = (us) => base + us / 1e6;
      return { ranks: answer.ranks.map((one) => ({ ...one, at })), leftOut: answer.left_out };
    };
    try {
      const all = await ask(range);
      if (!all.leftOut || !shown.length || jobs.size > MOST_JOBS) return { ...all, isThinned: all.leftOut > 0 };
      const isShown = ({ id, rank }) => jobs.get(id)?.includes(rank), whole = { ranks: all.ranks.filter((one) => !isShown(one)), leftOut: 0, isThinned: true };
      for (const [id, ranks] of jobs) {
        const answer = await ask(`${range}&job=${encodeURIComponent(id)}&ranks=${ranks}`);
        whole.ranks.push(...answer.ranks.filter(isShown));
        whole.leftOut += answer.leftOut;
      }
      return whole;
    } catch { return null; } // The state line shows a daemon that is gone.
  }

  async list() {
    await Promise.all([this.listGpus(), this.listFindings(), this.part("captures", "api/v1/captures", (answer) => answer),
      this.part("jobs", "api/v1/jobs", (answer) => { this.jobsAt = this.now; return answer.jobs; })]);
  }

  listFindings() {
    return Promise.all([this.part("findings", "api/v1/findings?limit=512", (answer) => answer.findings),
      this.part("incidents", "api/v1/incidents?limit=512", (answer) => answer.incidents)]);
  }

  async part(name, path, of) {
    try {
      const value = of(await request(path)), before = JSON.stringify(this[name]);
      this[name] = value;
      if (before !== JSON.stringify(value)) this.changed(name);
    } catch { /* The state line shows a daemon that is gone. */ }
  }

  async listGpus() {
    try {
      const { gpus } = await request("api/v1/gpus");
      this.skipped = gpus.filter(({ uuid }) => uuid === null);
      for (const one of gpus) {
        const gpu = this.gpus.get(one.uuid);
        if (!gpu) continue;
        Object.assign(gpu, { name: one.name, pci: one.pci_bus_id, trouble: one.trouble, total: one.memory_total_bytes,
          reserved: one.memory_reserved_bytes, usable: one.memory_usable_bytes, processes: one.processes, pods: one.pods, steps: one.slurm_steps, parent: one.parent_uuid });
        if (one.oldest_unix_nano !== null && this.originMs !== null) gpu.memory.oldest = this.seconds(one.oldest_unix_nano);
      }
      this.changed("gpus");
    } catch { /* Without GPUs the stream says why. */ }
  }

  // The earliest time of which the memory of any GPU is kept.
  oldest() {
    const oldest = Math.min(...[...this.gpus.values()].map(({ memory }) => Number.isFinite(memory.oldest) ? memory.oldest : memory.begin));
    return Number.isFinite(oldest) ? oldest : this.now - 1;
  }
}
