"use strict";
/* Whether traffic is still what the plan was made for, and what was done about it. Knows: GET drift. Refuses to know: how that is found out. */

const drift = {
  shown: "",
  changes: 0,

  async poll() {
    const answer = await fetch("drift", { headers: board.headers(), cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (answer.ok) this.show(await answer.json());
  },

  show(now) {
    const text = JSON.stringify(now);
    if (!now || text === this.shown) return;
    this.shown = text;
    const { applied, undone, failed } = now.changes;
    const changes = applied + undone + failed;
    if (changes !== this.changes) board.planned = false; // another plan is in force: it is asked for again
    this.changes = changes;
    const mark = document.getElementById("plan-sum");
    mark.textContent = now.state === "trial" ? "on trial" : now.drift ? "traffic has changed" : "";
    mark.classList.toggle("warn", Boolean(mark.textContent));
    const parts = [];
    if (now.says) parts.push(make("p", "drifted", make("b", "", now.state === "trial" ? "On trial: " : "Traffic has changed: "), now.says));
    if (now.state === "learning") parts.push(make("p", "hint", `Learning what is usual: ${digits(now.learnt)} of ${digits(now.learnt_of)} requests.`));
    else if (now.usual) parts.push(make("p", "hint", `Usual: ${now.usual}.`));
    if (now.proposal) parts.push(...this.proposal(now.proposal));
    const done = now.history.filter((one) => one.what !== "learnt").slice(-8).reverse();
    if (done.length) parts.push(make("h3", "", "What happened"), make("ul", "choices", ...done.map((one) => this.entry(one))));
    document.getElementById("drift-body").replaceChildren(...parts);
  },

  proposal(found) {
    const percent = (share) => `${digits(100 * share)} %`;
    const head = make("tr", "", ...["Simulated", "targets met", "TTFT p90", "TPOT p90"].map((name) => make("th", "", name)));
    const rows = found.tries.map((one) => make("tr", "", ...[one.name.replaceAll("_", " "), percent(one.attained), this.time(one.ttft_p90_s), this.time(one.tpot_p90_s)].map((cell) => make("td", "", cell))));
    const says = found.changed ? `By simulation of the newest traffic better: ${found.differs.join("; ")}.` : "By simulation of the newest traffic no other plan is clearly better.";
    return [make("p", "proposed", says), make("table", "", make("thead", "", head), make("tbody", "", ...rows)), make("p", "hint", `${found.step_times}.`)];
  },

  time(seconds) {
    return seconds === null ? "–" : showMs(1e3 * seconds);
  },

  entry(one) {
    return make("li", "", make("div", "row", make("b", "", one.what), make("span", "", new Date(1e3 * one.at).toLocaleTimeString())), make("p", "", one.says));
  },
};
