"use strict";
/* The live board. Knows: GET board (every second while the page is seen) and GET plan; who shows the parts. Refuses to know: the chat. */

/** Three digits: 0.412, 4.12, 41.2, 412, 4 120. */
function digits(value) {
  if (value === 0) return "0";
  if (value >= 1000) return Math.round(value).toLocaleString("en").replaceAll(",", "\u2009");
  return String(Number(value.toPrecision(3)));
}

const showMs = (ms) => (ms >= 1000 ? `${digits(ms / 1000)} s` : `${digits(ms)} ms`);
const showRate = (rate) => `${digits(rate)} tok/s`;
const showShare = (share) => `${digits(100 * share)} %`;
const showCount = (count) => digits(count);

function showBytes(bytes) {
  let value = bytes;
  let unit = "B";
  for (unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1000) break;
    if (unit !== "TiB") value /= 1024;
  }
  return `${Number(value.toPrecision(3))} ${unit}`;
}

/** The next round number of MiB or GiB. */
function roundBytes(bytes) {
  const unit = bytes > 1000 * 2 ** 20 ? 2 ** 30 : 2 ** 20;
  return roundUp(bytes / unit) * unit;
}

/** A big number with a small unit. */
function big(shown) {
  const [number, unit] = shown.split(" ");
  return make("b", "", number, ...(unit ? [make("small", "", unit)] : []));
}

function key(name, shown, second) {
  return make("span", second ? "key two" : "key", `${name} `, make("i", "", shown));
}

class Card {
  constructor(title, chart) {
    this.aside = make("span");
    this.numbers = make("div", "numbers");
    this.chart = chart;
    this.element = make("article", "card", make("h3", "", title, this.aside), this.numbers, chart.element);
  }

  show(aside, numbers, ...series) {
    this.aside.textContent = aside;
    this.numbers.replaceChildren(...numbers);
    this.chart.draw(...series);
  }
}

/** A bar from 0 to 1, and what it says. */
class Meter {
  /** `high`: from there on the bar warns. */
  constructor(name, high = Infinity) {
    this.high = high;
    this.value = make("b", "", "–");
    this.fill = make("div", "fill");
    this.bar = make("div", "track", this.fill);
    for (const [key, value] of [["role", "meter"], ["aria-label", name], ["aria-valuemin", 0], ["aria-valuemax", 1]]) this.bar.setAttribute(key, value);
    this.element = make("div", "meter", make("div", "row", make("span", "", name), this.value), this.bar);
  }

  show(share, text) {
    this.value.textContent = text;
    this.fill.style.width = `${100 * Math.min(1, share ?? 0)}%`;
    this.fill.classList.toggle("high", share >= this.high);
    this.bar.setAttribute("aria-valuenow", share ?? 0);
    this.bar.setAttribute("aria-valuetext", text);
  }
}

const board = {
  polls: 0,
  uptime: 0,
  key: () => "",
  onRefused: () => {},
  ttft: new Card("Time to first token", new Chart({ title: "Time to first token", names: ["p50", "p95"], show: showMs })),
  itl: new Card("Time between tokens", new Chart({ title: "Time between tokens", names: ["p50", "p95"], show: showMs })),
  flow: new Card("Throughput", new Chart({ title: "Throughput", names: ["out", "in"], lines: 1, show: showRate, area: true })),
  memory: new Card("Memory", new Chart({ title: "Memory", names: ["in RAM"], show: showBytes, round: roundBytes, area: true })),
  requests: new Card("Requests", new Chart({ title: "Requests", names: ["running", "waiting"], show: showCount, round: (most) => Math.max(2, roundUp(most)), area: true })),
  kv: new Meter("KV pages in use", 0.9),
  hits: new Meter("Prompt tokens from the cache"),
  busy: new Meter("Device busy"),
  slots: new Meter("Slots in use"),

  build() {
    const meters = make("div", "meters", this.kv.element, this.hits.element, this.busy.element, this.slots.element);
    const use = make("article", "card", make("h3", "", "In use"), meters);
    const cards = [this.ttft, this.itl, this.flow, this.memory, this.requests].map((card) => card.element);
    document.getElementById("cards").replaceChildren(...cards, use);
    timeline.build();
    document.getElementById("targets-form").addEventListener("input", () => this.poll());
    document.getElementById("targets-form").addEventListener("submit", (event) => event.preventDefault());
  },

  headers() {
    const key = this.key();
    return key ? { Authorization: `Bearer ${key}` } : {};
  },

  status(state, text) {
    const pill = document.getElementById("status");
    pill.dataset.state = state;
    if (pill.textContent !== text) pill.textContent = text;
    pill.title = text;
  },

  show(now) {
    const { series, memory, throughput } = now;
    const since = (times) => (times.p50_ms === null ? "–" : showMs(times.p50_ms));
    const slow = (times) => key("p95", times.p95_ms === null ? "–" : showMs(times.p95_ms), true);
    const told = (count, one, many) => (count ? `${digits(count)} ${count === 1 ? one : many}` : "");
    this.ttft.show(
      told(now.ttft.count, "request", "requests"), [big(since(now.ttft)), key("p50", ""), slow(now.ttft)],
      series.ttft_p50_ms, series.ttft_p95_ms,
    );
    this.itl.show(
      told(now.itl.count, "delivery", "deliveries"), [big(since(now.itl)), key("p50", ""), slow(now.itl)],
      series.itl_p50_ms, series.itl_p95_ms,
    );
    this.flow.show(
      "", [big(showRate(throughput.out_per_s)), key("out", ""), make("span", "", "in ", make("i", "", showRate(throughput.in_per_s)))],
      series.out_per_s, series.in_per_s,
    );
    const resident = memory.front_bytes === null ? null : memory.front_bytes + (memory.engine_bytes ?? 0);
    this.memory.show(
      memory.planned_bytes === null ? "" : `planned: at most ${showBytes(memory.planned_bytes)}`,
      [big(resident === null ? "–" : showBytes(resident)), key("in RAM", "")], series.resident_bytes,
    );
    this.requests.show(
      `${digits(now.finished)} ended`, [big(showCount(now.running)), key("running", ""), key("waiting", showCount(now.waiting), true)],
      series.running, series.waiting,
    );
    this.kv.show(memory.kv_used, `${showShare(memory.kv_used)} of ${digits(memory.kv_pages_total)}`);
    this.hits.show(now.cache_hit_rate, now.cache_hit_rate === null ? "–" : showShare(now.cache_hit_rate));
    this.busy.show(now.device_busy, showShare(now.device_busy));
    this.slots.show(now.running / now.max_running, `${now.running} of ${now.max_running}`);
    document.getElementById("model").textContent = now.model;
    document.getElementById("version").textContent = `Tradewind ${now.version}`;
    document.getElementById("uptime").textContent = `up ${spelledTime(now.uptime_s)}`;
    const told_overload = overload(now.overload, now.step_times);
    const place = document.getElementById("overload");
    if (place.textContent !== told_overload) place.textContent = told_overload;
    targets.show(now.attainment);
    if (now.uptime_s < this.uptime) timeline.forget();
    this.uptime = now.uptime_s - 5; // answers may come in another order
    if (now.timeline) timeline.take(now.timeline);
    this.status(now.status === "ok" ? "ok" : "bad", now.status === "ok" ? "serving" : now.status);
  },

  async poll() {
    try {
      const since = timeline.since();
      const query = [...(since === null ? [] : [`steps=${since}`]), ...targets.query()].join("&");
      const answer = await fetch(query ? `board?${query}` : "board", { headers: this.headers(), cache: "no-store", signal: AbortSignal.timeout(5000) });
      if (answer.status === 401) {
        this.status("bad", "API key needed");
        this.onRefused();
      } else if (!answer.ok) {
        this.status("bad", `error ${answer.status}`);
      } else {
        this.show(await answer.json());
        if (!this.planned) await this.plan();
        if (document.getElementById("slowest-body").checkVisibility() && this.polls % 3 === 0) await receipts.poll();
        if (this.polls++ % 3 === 1) await drift.poll();
      }
    } catch {
      this.status("bad", "not reachable");
    }
  },

  async run() {
    for (;;) {
      if (!document.hidden) await this.poll();
      await new Promise((done) => setTimeout(done, 1000));
    }
  },

  async plan() {
    const answer = await fetch("plan", { headers: this.headers() });
    if (!answer.ok) return;
    this.planned = true;
    const plan = await answer.json();
    document.getElementById("plan-body").replaceChildren(...(plan ? planned(plan) : [make("p", "hint", "A script is served: nothing was planned.")]));
  },
};

/** What is given up, and how well step times are known; empty where the plan has neither. */
function overload(ladder, times) {
  const parts = [];
  if (ladder && ladder.level) {
    parts.push(`overload: rung ${ladder.level} of ${ladder.most}, ${ladder.gives_up}${ladder.refused ? `, ${digits(ladder.refused)} refused` : ""}`);
  } else if (ladder && ladder.changes) {
    parts.push(`nothing given up now${ladder.refused ? `, ${digits(ladder.refused)} were refused` : ""}`);
  }
  if (times && times.error_p50 !== null) parts.push(`step times known to ${showShare(times.error_p50)}`);
  return parts.join(" · ");
}

function spelledTime(seconds) {
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** "fair: it has to be asked for; slo: no class has a target" as a list. */
function rejected(text) {
  return make("ul", "rejected", ...text.split(/;\s+/).map((one) => {
    const [, name, why] = one.match(/^([^:]{1,60}):\s(.+)$/s) ?? [null, one, ""];
    return make("li", "", make("b", "", name), why ? `: ${why}` : "");
  }));
}

function planned(plan) {
  const facts = make("dl");
  for (const [name, text] of [
    ["Scenario", plan.scenario],
    ["Model", `${plan.model} (${plan.family}, ${digits(plan.parameters / 1e6)}M parameters, ${plan.layers} layers)`],
    ["Machine", `${plan.machine}, ${plan.cores} cores, ${showBytes(plan.memory_bytes)}`],
    ["Limits", `${digits(plan.max_context)} tokens of context, ${plan.max_running} at once, ${digits(plan.max_tokens_per_step)} tokens a step`],
    ["Queue", plan.policy],
    ...plan.classes.map((one) => [`Class ${one.name}`, ["ttft", "tpot", "e2e"].filter((name) => one[`${name}_s`] != null).map((name) => `${METRIC[name].toLowerCase()} ${showMs(1e3 * one[`${name}_s`])}`).join(", ") || "no targets"]),
  ]) facts.append(make("dt", "", name), make("dd", "", text));
  const reasons = make("ul", "choices", ...plan.reasons.map((reason) => {
    const item = make("li", "", make("div", "row", make("b", reason.pinned ? "pinned" : "", reason.choice.replaceAll("_", " ")), make("span", "", reason.value)), make("p", "", reason.why));
    if (reason.rejected) item.append(make("p", "not", "Rejected:"), rejected(reason.rejected));
    return item;
  }));
  const total = plan.ledger.reduce((sum, line) => sum + line.bytes, 0);
  const ledger = make("ul", "", ...plan.ledger.map((line) => {
    const share = make("div", "fill");
    share.style.width = `${(100 * line.bytes) / total}%`;
    return make(
      "li", "", make("div", "row", make("b", "", line.name), make("span", "", showBytes(line.bytes))), make("div", "track", share), make("p", "", line.how),
    );
  }));
  return [facts, make("h3", "", "Choices"), reasons, make("h3", "", `Memory, at most ${showBytes(total)}`), ledger];
}
