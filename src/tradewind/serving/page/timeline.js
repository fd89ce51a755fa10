"use strict";
/* The steps: a column each, who was in it below. Knows: `timeline` of GET board. Refuses to know: where the letters come from. */
const KEPT_STEPS = 600;
const COLUMN = 7; // pixels
const ROWS = { time: 46, tokens: 40, lane: 15, gap: 6 };
const MOST_LANES = 20;
/** letter: [in a word, why it is not in the step] */
const WAITS = {
  s: ["slot", "all slots are in use"], p: ["KV pages", "no KV pages are free"], t: ["step budget", "others’ prompts fill the step’s token budget"],
  g: ["grammar", "its grammar is being compiled"], x: ["same prefix", "another request is computing the same prefix"],
  m: ["first sample", "the first sample of its prompt is not computed"], q: ["next step", "nothing is missing but the next step"],
};
const CELLS = { P: "its prompt was computed", C: "its prompt was computed behind what the cache had", D: "its answer was computed", "-": "it had a slot and no part in the step", E: "it was evicted and waited to go on", o: "a row of it was computed in vain, for it had ended by then" };
const STATES = { queue: "waits", prefill: "prompt", decode: "answer", preempted: "evicted", stop: "ended", length: "ended", abort: "left", error: "failed" };
/** class of a drawn path: the letters it stands for, and how high a cell is. */
const MARKS = { prompt: ["PC", 1], cached: ["C", 1], answer: ["D", 0.55], idle: ["-o", 0.12], resource: ["spt", 0.34], own: ["gxm", 0.34], next: ["q", 0.2], evicted: ["E", 0.8] };

const timeline = {
  steps: [], // rows as the server tells them
  lanes: new Map(), // number -> {…, cells: Map of step -> letter}
  paused: false,
  at: null, // {step, lane}: where the reader is
  end: null, // the last step that is seen while it is paused
  more: 0,

  /** What the server is asked for; null: nothing. */
  since() {
    return this.paused || !document.getElementById("steps-body").checkVisibility() ? null : this.steps.at(-1)?.[0] ?? 0;
  },

  take(now) {
    if (this.paused) return; // asked before it was
    const last = this.steps.at(-1)?.[0] ?? 0;
    this.steps.push(...now.steps.filter((step) => step[0] > last)); // two answers may overlap
    this.steps.splice(0, Math.max(0, this.steps.length - KEPT_STEPS));
    this.more = now.more_lanes;
    for (const lane of now.lanes) {
      const known = this.lanes.get(lane.n) ?? { cells: new Map() };
      now.steps.forEach((step, place) => known.cells.set(step[0], lane.cells[place]));
      this.lanes.set(lane.n, { ...lane, cells: known.cells });
    }
    const oldest = this.steps[0]?.[0] ?? 0;
    for (const [n, lane] of this.lanes) {
      for (const step of lane.cells.keys()) if (step < oldest) lane.cells.delete(step);
      if (!lane.cells.size) this.lanes.delete(n);
    }
    this.draw();
  },

  /** Another server: its steps are counted anew. */
  forget() {
    this.steps = [];
    this.lanes.clear();
    this.at = this.end = null;
  },

  build() {
    const body = document.getElementById("steps-body");
    this.pauseButton = make("button", "quiet", "Pause");
    this.slowButton = make("button", "quiet", "Slowest step");
    this.tableButton = make("button", "quiet", "As a table");
    this.pauseButton.setAttribute("aria-pressed", "false");
    this.tableButton.setAttribute("aria-expanded", "false");
    for (const button of [this.pauseButton, this.slowButton, this.tableButton]) button.type = "button";
    this.pauseButton.addEventListener("click", () => this.pause(!this.paused));
    this.slowButton.addEventListener("click", () => this.slowest());
    this.tableButton.addEventListener("click", () => {
      this.tableButton.setAttribute("aria-expanded", String(this.spoken.hidden));
      this.spoken.hidden = !this.spoken.hidden;
      this.draw();
    });
    const legend = make("p", "legend", ...[
      ["prompt", "prompt"], ["cached", "prompt, partly cached"], ["answer", "answer"], ["resource", "waits for slot, KV pages or budget"], ["own", "waits for grammar or prefix"],
      ["next", "waits for the next step"], ["evicted", "evicted"],
    ].map(([name, text]) => make("span", "", make("i", name), text)));
    this.names = make("div", "names");
    this.names.setAttribute("aria-hidden", "true"); // it changes every second; the table is for those who hear it
    this.svg = shape("svg");
    this.svg.setAttribute("role", "img");
    this.paths = Object.fromEntries(["grid", "gap", "device", "host", "cut", "in", "out", "others", ...Object.keys(MARKS), "cursor"].map((name) => [name, shape("path", name)]));
    this.svg.append(...Object.values(this.paths));
    this.field = make("div", "field-of-steps", this.svg);
    this.field.tabIndex = 0;
    this.field.setAttribute("role", "application"); // the arrow keys are for it
    this.field.setAttribute("aria-label", "Steps; arrow keys move from step to step and from request to request");
    this.told = make("p", "told");
    this.told.setAttribute("aria-live", "polite");
    this.spoken = make("div", "spoken");
    this.spoken.hidden = true;
    body.replaceChildren(make("div", "tools", this.pauseButton, this.slowButton, this.tableButton), make("div", "steps-plot", this.names, this.field), this.told, legend, this.spoken);
    this.field.addEventListener("pointermove", (event) => this.point(event));
    this.field.addEventListener("pointerleave", () => { if (!this.paused) { this.at = null; this.draw(); } });
    this.field.addEventListener("click", (event) => { this.pause(true); this.point(event); });
    this.field.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(() => this.draw()).observe(this.field);
  },

  pause(on) {
    this.paused = on;
    this.end = on ? this.seen.at(-1)?.[0] ?? null : null;
    if (!on) this.at = null;
    this.pauseButton.textContent = on ? "Go on" : "Pause";
    this.pauseButton.setAttribute("aria-pressed", String(on));
    this.draw();
  },

  slowest() {
    if (!this.steps.length) return;
    const time = (step) => step[2] + step[3];
    const worst = this.steps.reduce((most, step) => (time(step) > time(most) ? step : most));
    this.at = { step: worst[0], lane: null };
    if (!this.paused) this.pause(true);
    this.end = Math.min(this.steps.at(-1)[0], worst[0] + Math.floor(this.columns / 2));
    this.draw();
  },

  get columns() {
    return Math.max(12, Math.floor(this.field.clientWidth / COLUMN));
  },

  get seen() {
    const last = this.paused && this.end !== null ? this.steps.findIndex((step) => step[0] === this.end) + 1 : this.steps.length;
    return this.steps.slice(Math.max(0, last - this.columns), last);
  },

  draw() {
    if (!this.field.clientWidth) return;
    const seen = this.seen;
    const there = [...this.lanes.values()].filter((lane) => seen.some((step) => (lane.cells.get(step[0]) ?? ".") !== ".")).sort((a, b) => a.n - b.n);
    // What waits is shown before what runs, for that is what people look for.
    const lanes = there.length <= MOST_LANES ? there : [...there].sort((a, b) => this.weight(b, seen) - this.weight(a, seen)).slice(0, MOST_LANES).sort((a, b) => a.n - b.n);
    Object.assign(this, { drawn: seen, rows: lanes });
    const tops = { time: 0, tokens: ROWS.time + ROWS.gap, lanes: ROWS.time + ROWS.tokens + 2 * ROWS.gap };
    tops.others = tops.lanes + lanes.length * ROWS.lane + 3;
    const height = tops.others + ROWS.lane;
    const width = this.columns * COLUMN;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
    const d = Object.fromEntries(Object.keys(this.paths).map((name) => [name, ""]));
    const times = seen.map((step) => step[2] + step[3]).sort((a, b) => a - b);
    // One stalled step must not make all others invisible: beyond four times what nine of ten took, columns are cut and marked.
    const most = roundUp(Math.max(0.01, Math.min(times.at(-1) ?? 0, 4 * (times[Math.floor(0.9 * times.length)] ?? 0))));
    const mostTokens = Math.max(4, roundUp(Math.max(0, ...seen.map((step) => step[5] + step[6]))));
    const mostOthers = Math.max(1, ...seen.map((step) => this.others(step)));
    const column = (name, place, top, room, from, to, scale) => {
      if (to <= from) return;
      const y = top + room - (room * Math.min(scale, to)) / scale;
      d[name] += `M${place * COLUMN} ${y.toFixed(1)}h${COLUMN - 1}v${((room * (Math.min(scale, to) - from)) / scale).toFixed(1)}h${1 - COLUMN}z`;
    };
    d.grid = [tops.time + ROWS.time, tops.tokens + ROWS.tokens, tops.others + ROWS.lane].map((y) => `M0 ${y - 0.5}h${width}`).join("");
    const first = this.columns - seen.length;
    seen.forEach((step, at) => {
      const place = first + at;
      // Between two answers more steps may run than one tells.
      if (at && step[0] - seen[at - 1][0] > 1) d.gap += `M${place * COLUMN - 0.5} 0v${height}`;
      column("device", place, tops.time, ROWS.time, 0, step[2], most);
      column("host", place, tops.time, ROWS.time, step[2], step[2] + step[3], most);
      if (step[2] + step[3] > most) d.cut += `M${place * COLUMN} 0h${COLUMN - 1}v4h${1 - COLUMN}z`;
      column("in", place, tops.tokens, ROWS.tokens, 0, step[6], mostTokens);
      column("out", place, tops.tokens, ROWS.tokens, step[6], step[5] + step[6], mostTokens);
      column("others", place, tops.others, ROWS.lane - 2, 0, this.others(step), mostOthers);
      lanes.forEach((lane, row) => {
        const letter = lane.cells.get(step[0]);
        for (const [name, [letters, part]] of Object.entries(MARKS)) {
          if (!letters.includes(letter)) continue;
          const high = (ROWS.lane - 3) * part;
          const wide = name === "cached" ? 3 : COLUMN - 1;
          d[name] += `M${place * COLUMN} ${(tops.lanes + row * ROWS.lane + (ROWS.lane - high) / 2).toFixed(1)}h${wide}v${high.toFixed(1)}h${-wide}z`;
        }
      });
    });
    const spot = this.at ? seen.findIndex((step) => step[0] === this.at.step) : -1;
    const line = this.at?.lane == null ? -1 : lanes.findIndex((lane) => lane.n === this.at.lane);
    if (spot >= 0) {
      d.cursor = `M${(first + spot) * COLUMN - 0.5} 0h${COLUMN}V${height}h${-COLUMN}z`;
      if (line >= 0) d.cursor += `M0 ${tops.lanes + line * ROWS.lane}h${width}v${ROWS.lane}h${-width}z`;
    }
    for (const [name, path] of Object.entries(this.paths)) path.setAttribute("d", d[name]);
    this.label(most, mostTokens, lanes, line, d.cut !== "");
    this.tell(seen[spot], lanes[line]);
    const last = seen.at(-1);
    this.svg.setAttribute("aria-label", last ? `${seen.length} steps up to number ${last[0]}. ${lanes.length === 1 ? "1 request is" : `${lanes.length} requests are`} shown. The last step took ${showMs(last[2])} on the device.` : "No steps yet");
    document.getElementById("steps-sum").textContent = last ? `${this.paused ? "paused at" : "up to"} ${digits(last[0])}` : "none yet";
    if (!this.spoken.hidden) this.speak(seen);
  },

  /** Waiting steps count most, then prompts, then answers. */
  weight(lane, seen) {
    return seen.reduce((sum, step) => sum + ("sptgxmE".includes(lane.cells.get(step[0]) || ".") ? 100 : "PC".includes(lane.cells.get(step[0]) || ".") ? 10 : 0), 0) - lane.n / 1e9;
  },

  /** Rows of a step that no lane shows. */
  others(step) {
    return Math.max(0, step[4] - this.rows.filter((lane) => "PCDo".includes(lane.cells.get(step[0]) ?? ".")).length);
  },

  label(most, mostTokens, lanes, line, cut) {
    const name = (height, ...children) => {
      const row = make("div", "name", ...children);
      row.style.height = `${height}px`;
      return row;
    };
    const rows = [
      name(ROWS.time + ROWS.gap, make("b", "", "Time"), make("span", "", `of ${showMs(most)}${cut ? ", some cut" : ""}`), make("p", "", make("span", "key device", "device"), make("span", "key host", "host"))),
      name(ROWS.tokens + ROWS.gap, make("b", "", "Tokens"), make("span", "", `of ${digits(mostTokens)}`), make("p", "", make("span", "key in", "prompts"), make("span", "key out", "answers"))),
      ...lanes.map((lane, row) => {
        const shown = name(ROWS.lane, make("span", "id", shortId(lane.id)), make("span", this.held(lane) ? "state warn" : "state", this.state(lane)));
        if (row === line) shown.classList.add("here");
        return shown;
      }),
      name(ROWS.lane + 3, make("span", "", "all others")),
    ];
    rows[0].classList.add("tall");
    rows[1].classList.add("tall");
    this.names.replaceChildren(...rows);
  },

  state(lane) {
    const letter = this.paused ? lane.cells.get(this.drawn.at(-1)?.[0]) ?? "." : ".";
    if (letter !== ".") return WAITS[letter] ? `waits: ${WAITS[letter][0]}` : { P: "prompt", C: "prompt", D: "answer", E: "evicted", o: "ended" }[letter] ?? "in a slot";
    if (lane.state === "queue" && lane.waits.length) return `${WAITS[lane.waits[0][0]][0]} ${lane.waited_s < 0.1 ? showMs(Math.round(1e3 * lane.waited_s)) : `${lane.waited_s.toFixed(lane.waited_s < 10 ? 1 : 0)} s`}`;
    return STATES[lane.state] ?? lane.state;
  },

  /** Whether it is not getting on, at the last step that is seen. */
  held(lane) {
    return this.paused ? "sptgxmqE".includes(lane.cells.get(this.drawn.at(-1)?.[0]) ?? ".") : lane.state === "queue" || lane.state === "preempted";
  },

  /** Why it waited before its first slot, in a sentence. */
  why(lane) {
    const waits = lane.waits.filter((wait) => wait[1] >= 0.0005 && (wait[0] !== "q" || lane.waits.length === 1));
    if (!waits.length) return "";
    return waits.map(([letter, seconds, who]) => `${showMs(1e3 * seconds)}: ${WAITS[letter][1]}${who ? `, most of it ${shortId(who)}` : ""}`).join("; ");
  },

  tell(step, lane) {
    if (!step) {
      this.say(this.steps.length ? "Point at a step, or use the arrow keys, to see what was in it. A click pauses." : "Nothing has run yet.");
      return;
    }
    const [n, at, device, host, rows, out, prompts, wrong, running, waiting, kv, chunks, others, otherTokens] = step;
    const whose = chunks.map(([number, count]) => `${shortId(this.lanes.get(number)?.id ?? `request ${number}`)} ${digits(count)}`);
    if (others) whose.push(`${others} ${others === 1 ? "other" : "others"} ${digits(otherTokens)}`);
    const before = this.drawn[this.drawn.indexOf(step) - 1]?.[0] ?? n - 1;
    const parts = [rows === 1 ? "1 row" : `${digits(rows)} rows`];
    if (prompts) parts.push(`prompts ${digits(prompts)} tokens (${whose.join(", ")})`);
    if (out) parts.push(`answers ${digits(out)}${wrong ? `, ${digits(wrong)} guessed wrong` : ""}`);
    const said = [make("b", "", `Step ${digits(n)}`), ` at ${spelledTime(at)}: device ${showMs(device)}, host ${showMs(host)} · ${parts.join(", ")} · ${running} running, ${waiting} waiting, KV ${showShare(kv)}${n - before > 1 ? ` · ${digits(n - before - 1)} steps before it were not fetched` : ""}`];
    if (lane) {
      const letter = lane.cells.get(n) ?? ".";
      const why = this.why(lane);
      const cached = lane.cached ? `, ${digits(lane.cached)} cached` : "";
      said.push(make("br"), make("b", "", shortId(lane.id)), ` prompt ${digits(lane.prompt)}${cached}: ${CELLS[letter] ?? WAITS[letter]?.[1] ?? "it was not there"}.`, why ? ` Waited ${why}.` : "");
    }
    this.say(...said);
  },

  /** What has not changed is not said again. */
  say(...children) {
    const line = make("span", "", ...children);
    if (line.textContent !== this.told.textContent) this.told.replaceChildren(line);
  },

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const place = Math.floor((event.clientX - box.left) / COLUMN) - (this.columns - this.drawn.length);
    const row = Math.floor((event.clientY - box.top - ROWS.time - ROWS.tokens - 2 * ROWS.gap) / ROWS.lane);
    const step = this.drawn[place];
    this.at = step ? { step: step[0], lane: this.rows[row]?.n ?? null } : null;
    this.draw();
  },

  move(event) {
    const side = { ArrowLeft: -1, ArrowRight: 1, Home: -KEPT_STEPS, End: KEPT_STEPS }[event.key] ?? 0;
    const down = { ArrowUp: -1, ArrowDown: 1 }[event.key] ?? 0;
    if ((!side && !down) || !this.steps.length) return;
    event.preventDefault();
    if (!this.paused) this.pause(true);
    const known = this.steps.findIndex((step) => step[0] === (this.at?.step ?? this.steps.at(-1)[0]));
    const place = Math.max(0, Math.min(this.steps.length - 1, known + (this.at ? side : 0)));
    const row = this.rows.findIndex((lane) => lane.n === this.at?.lane) + down;
    this.at = { step: this.steps[place][0], lane: this.rows[Math.min(row, this.rows.length - 1)]?.n ?? null };
    if (this.at.step > this.end) this.end = this.at.step;
    else if (this.at.step < this.seen[0][0]) this.end = this.steps[Math.min(this.steps.length - 1, place + this.columns - 1)][0];
    this.draw();
  },

  /** The same for those who cannot see it, and to be copied. */
  speak(seen) {
    const steps = seen.slice(-20).reverse().map((step) => [
      digits(step[0]), showMs(step[2]), showMs(step[3]), digits(step[6]), digits(step[5]), `${step[8]} / ${step[9]}`, showShare(step[10]),
    ]);
    const lanes = this.rows.map((lane) => [
      shortId(lane.id), this.state(lane), digits(lane.prompt), digits(lane.cached), showMs(1e3 * lane.waited_s), this.why(lane) || "–",
    ]);
    this.spoken.replaceChildren(
      table("Requests in these steps", ["request", "state", "prompt", "cached", "waited", "why"], lanes),
      table("The latest steps", ["step", "device", "host", "prompts", "answers", "running / waiting", "KV"], steps),
    );
  },
};
