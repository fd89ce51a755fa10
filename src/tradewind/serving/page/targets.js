"use strict";
/* Attainment by class. Knows: `attainment` of GET board, and the targets that this tab asks for. Refuses to know: how they are counted. */
const METRIC = { ttft: "First token", tpot: "Between tokens", e2e: "Whole answer" };

/** 0.973 -> "97.3 %"; never "100 %" where something was missed. */
function percent(share) {
  if (share < 1 && share > 0.999) return "99.9 %";
  return `${digits(Math.round(1000 * share) / 10)} %`;
}

/** A table with a caption that is read but not seen. Cells are text or elements; the first of a row is its heading. */
function table(caption, heads, rows) {
  const head = make("tr", "", ...heads.map((text) => Object.assign(make("th", "", text), { scope: "col" })));
  const body = rows.map((cells) => make("tr", "", ...cells.map((cell, place) => {
    const shown = make(place ? "td" : "th", "", cell);
    if (!place) shown.scope = "row";
    return shown;
  })));
  return make("div", "scroll", make("table", "", make("caption", "heard", caption), make("thead", "", head), make("tbody", "", ...body)));
}

const targets = {
  fields: { ttft: "target-ttft", tpot: "target-tpot", e2e: "target-e2e" },

  /** What this tab asks for, as it goes into the address. */
  query() {
    return Object.entries(this.fields)
      .map(([metric, id]) => [metric, document.getElementById(id).valueAsNumber])
      .filter(([, value]) => value > 0 && value <= 1e7)
      .map(([metric, value]) => `${metric}_ms=${Number(value.toFixed(3))}`);
  },

  show(now) {
    document.getElementById("targets-form").hidden = now.planned && now.classes.every((one) => one.metrics.some((metric) => metric.target_ms !== null));
    document.getElementById("targets-body").replaceChildren(...now.classes.map((one) => this.one(one, now)));
    const known = now.classes.filter((one) => one.attained);
    document.getElementById("targets-sum").textContent = known.length
      ? known.map((one) => `${one.name} ${percent(one.attained.share)}`).join(" · ")
      : now.classes.some((one) => one.metrics.some((metric) => metric.target_ms !== null)) ? "nothing with a target has ended yet" : "no targets are set";
  },

  one(one, { since_s: since, bin_s: bin }) {
    const { attained } = one;
    const said = [`${digits(one.requests)} ended in ${since === 120 ? "2 min" : spelledTime(since)}`];
    if (one.failed) said.push(`${digits(one.failed)} failed`);
    if (one.left) said.push(`${digits(one.left)} left`);
    const late = one.late ? [make("span", "warn", `${one.late} of ${one.open} open late already`)] : one.open ? [make("span", "", `${one.open} open`)] : [];
    const head = make("div", "row", make("h3", "", one.name), make("span", "", said.join(", ")), ...late);
    const out = make("div", "class", head);
    if (attained) {
      const bar = make("div", "interval", make("div", "fill"), make("div", "whisker"));
      bar.firstChild.style.width = `${100 * attained.share}%`;
      bar.lastChild.style.left = `${100 * attained.low}%`;
      bar.lastChild.style.width = `${100 * (attained.high - attained.low)}%`;
      const text = `${percent(attained.share)} met all targets; 95 % interval ${percent(attained.low)} to ${percent(attained.high)}`;
      bar.setAttribute("role", "img");
      bar.setAttribute("aria-label", text);
      out.append(make("div", "attained", big(percent(attained.share)), make("span", "", `met all targets (${attained.met} of ${attained.of})`), this.spark(one.series, bin)), bar);
    }
    out.append(table(`Times of ${one.name}`, ["", "target", "met", "p50", "p95"], one.metrics.map((metric) => [
      METRIC[metric.metric],
      metric.target_ms === null ? "–" : showMs(metric.target_ms),
      metric.attained ? percent(metric.attained.share) : "–",
      metric.p50_ms === null ? "–" : showMs(metric.p50_ms),
      metric.p95_ms === null ? "–" : showMs(metric.p95_ms),
    ])));
    return out;
  },

  /** Attainment over the last two minutes: a bar for each stretch, none where nothing ended. */
  spark(series, bin) {
    const svg = shape("svg", "spark");
    svg.setAttribute("viewBox", `0 0 ${series.length * 4} 20`);
    svg.setAttribute("role", "img");
    const known = series.filter((share) => share !== null);
    svg.setAttribute("aria-label", known.length ? `In stretches of ${bin} s: at least ${percent(Math.min(...known))}, at last ${percent(known.at(-1))}` : "Nothing ended yet");
    let base = "", met = "", missed = "";
    series.forEach((share, place) => {
      base += `M${4 * place} 19.5h3`;
      if (share === null) return;
      if (share > 0) met += `M${4 * place} 19v${-19 * share}h3v${19 * share}z`;
      if (share < 1) missed += `M${4 * place} ${19 - 19 * share}v${-19 * (1 - share)}h3v${19 * (1 - share)}z`;
    });
    for (const [name, d] of [["base", base], ["met", met], ["missed", missed]]) {
      const path = shape("path", name);
      path.setAttribute("d", d);
      svg.append(path);
    }
    return svg;
  },
};
