"use strict";
/* The slowest requests and where their time went. Knows: GET v1/receipts. Refuses to know: how parts are measured. */

/** part: [what it is, its kind]. Kinds have a colour each: own work, others' work, waiting, the front, the engine. */
const PARTS = {
  read: ["its body was on the way", "front"], parse: ["its JSON was read", "front"], tokenise: ["template and tokens", "front"],
  inbox: ["on the way to the engine", "engine"], grammar: ["its grammar was compiled", "wait"],
  sample_wait: ["waited for its first sample", "wait"], prefix_wait: ["another computed the same prefix", "wait"],
  queue_slot: ["all slots were in use", "wait"], queue_pages: ["no KV pages were free", "wait"],
  queue_tokens: ["others’ prompts filled the steps", "wait"], queue_step: ["waited for the next step", "wait"],
  prefill: ["its own prompt", "own"], recompute: ["computed again after an eviction", "wait"], others_prefill: ["others’ prompts in its steps", "others"],
  decode: ["its own answer", "own"], others_decode: ["others’ answers in its steps", "others"],
  grammar_masks: ["masks of its grammar", "wait"], others_grammar: ["masks of others’ grammars", "others"], draft: ["guesses made, and wrong ones", "engine"],
  engine: ["the engine, between steps", "engine"], stall: ["steps that took too long", "engine"], preempted: ["evicted, waited to go on", "wait"],
  delivery: ["on the way to the front", "front"], detokenise: ["tokens became text", "front"], socket: ["the client took nothing", "front"],
};
const CAUSES = {
  kv_pages: "KV pages full", slots: "slots full", neighbour: "others’ prompts", batch: "others’ answers", cold_prefix: "cold prefix", long_prompt: "long prompt",
  answer: "its own answer", grammar: "grammar", others_grammar: "others’ grammars", shared_prefix: "shared prefix", drafts: "wrong guesses", client: "slow client", front: "HTTP front",
  engine: "engine", device_stall: "device stall",
};
const LEGEND = { own: "its own work", others: "others’ work", wait: "waiting", engine: "engine", front: "front and client" };

/** The parts side by side, together as wide as `share` of the room. */
function partsBar(parts, total, name, share = 1) {
  const bar = make("div", "parts", ...parts.map((part, place) => {
    const piece = make("i", `${PARTS[part.name]?.[1] ?? "engine"}${place % 2 ? " odd" : ""}`);
    piece.style.width = `${(100 * part.seconds) / total}%`;
    piece.title = `${PARTS[part.name]?.[0] ?? part.name}: ${showMs(1e3 * part.seconds)}`;
    return piece;
  }));
  bar.style.width = `${100 * share}%`;
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", name);
  return make("div", "room", bar);
}

const receipts = {
  shown: "",

  async poll() {
    const answer = await fetch("v1/receipts?slowest=8", { headers: board.headers(), cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (answer.ok) this.show((await answer.json()).receipts);
  },

  show(list) {
    const now = JSON.stringify(list.map((one) => one.id));
    if (now === this.shown) return;
    this.shown = now;
    const body = document.getElementById("slowest-body");
    const open = new Set([...body.querySelectorAll("details[open]")].map((one) => one.dataset.id));
    const focused = document.activeElement?.closest?.("details")?.dataset.id;
    const legend = make("p", "legend", ...Object.entries(LEGEND).map(([kind, text]) => make("span", "", make("i", kind), text)));
    const longest = Math.max(...list.map((one) => one.e2e_s));
    const rows = list.map((one) => this.one(one, longest, open.has(one.id)));
    body.replaceChildren(...(rows.length ? [legend, ...rows] : [make("p", "hint", "No request has ended yet.")]));
    if (focused) rows.find((row) => row.dataset.id === focused)?.firstChild.focus();
  },

  one(one, longest, open) {
    const whole = showMs(1e3 * one.e2e_s);
    const cause = CAUSES[one.binding.cause] ?? one.binding.cause;
    const out = make("details", "receipt", make(
      "summary", "",
      make("span", "id", shortId(one.id)), make("b", "", whole), make("span", "cause", cause),
      partsBar(one.e2e, one.e2e_s, `${shortId(one.id)}: ${whole}, ${cause}`, one.e2e_s / longest),
    ));
    out.dataset.id = one.id;
    out.open = open;
    const fill = () => { if (out.open && out.children.length === 1) out.append(...this.inside(one)); };
    out.addEventListener("toggle", fill);
    fill();
    return out;
  },

  inside(one) {
    const facts = [
      one.id, one.endpoint, new Date(1e3 * one.arrived).toLocaleTimeString(), one.finish,
      `prompt ${digits(one.prompt_tokens)}${one.cached_tokens ? `, ${digits(one.cached_tokens)} cached` : ""}`, `answer ${digits(one.completion_tokens)}`,
    ];
    if (one.tpot_s !== null) facts.push(`${showMs(1e3 * one.tpot_s)} a token`);
    if (one.preemptions) facts.push(`${one.preemptions} evictions`);
    const out = [make("p", "hint", facts.join(" · ")), make("p", "says", make("b", "", "Bound by "), one.binding.says)];
    if (one.counterfactual) out.push(make("p", "says", make("b", "", "With "), whatIf(one.counterfactual)));
    if (one.error) out.push(make("p", "warn", one.error));
    if (one.ttft_s !== null) {
      const first = `To the first token, ${showMs(1e3 * one.ttft_s)}`;
      out.push(make("h4", "", first), partsBar(one.ttft, one.ttft_s, first, one.ttft_s / one.e2e_s));
    }
    const whole = `Whole, ${showMs(1e3 * one.e2e_s)}`;
    out.push(make("h4", "", whole), partsBar(one.e2e, one.e2e_s, whole));
    const ttft = Object.fromEntries(one.ttft.map((part) => [part.name, part.seconds]));
    const rows = one.e2e.map((part) => [
      make("span", "part", make("i", PARTS[part.name]?.[1] ?? "engine"), make("span", "", PARTS[part.name]?.[0] ?? part.name, ...(part.blocked_by ? [make("small", "", `most of it ${shortId(part.blocked_by)}`)] : []))),
      ttft[part.name] ? showPart(ttft[part.name]) : "–", showPart(part.seconds), percent(part.seconds / one.e2e_s),
    ]);
    rows.push(["Together", one.ttft_s === null ? "–" : showMs(1e3 * one.ttft_s), showMs(1e3 * one.e2e_s), "100 %"]);
    out.push(table("Where the time went", ["part", "first token", "whole", "share"], rows));
    return out;
  },
};

const showPart = (seconds) => (seconds < 1e-5 ? "< 0.01 ms" : showMs(1e3 * seconds));

/** "one more slot: first token 180 ms sooner" */
function whatIf(made) {
  const told = [
    ["first token", made.ttft_s], ["whole answer", made.e2e_s === made.ttft_s ? 0 : made.e2e_s], ["longest gap", made.longest_gap_s], ["others’ time a token", made.others_tpot_s],
  ].filter(([, seconds]) => Math.abs(seconds) >= 1e-5).map(([name, seconds]) => `${name} ${seconds < 0 ? "−" : "+"}${showMs(1e3 * Math.abs(seconds))}`);
  return `${made.change}: ${told.join(", ")} (computed, not measured)`;
}

/** "chatcmpl-667d…99bc" is what people can compare. */
function shortId(id) {
  return id.length > 14 && !id.includes(" ") ? `…${id.slice(-6)}` : id;
}
