"use strict";
/* Line charts in SVG, by hand. Knows: how a column of numbers is drawn. Refuses to know: what the numbers are. */
const SVG = "http://www.w3.org/2000/svg";
const JOIN = 5; // gaps up to so many seconds are drawn through

/** An HTML element with a class and children (text or elements). */
function make(tag, name, ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children);
  return element;
}

function shape(tag, name) {
  const element = document.createElementNS(SVG, tag);
  if (name) element.setAttribute("class", name);
  return element;
}

/** The next round number (1, 2, 2.5 or 5 times a power of ten). */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((step) => step * power >= value * 0.9999) * power;
}

class Chart {
  /** `show` spells a value; `names` are the series', of which the first `lines` are drawn and all are told to the pointer.
   *  `area`: the first is filled. `round` finds the upper end of the scale. */
  constructor({ title, names, show, lines = names.length, area = false, round = roundUp }) {
    Object.assign(this, { title, names, show, area, round, series: [] });
    this.svg = shape("svg");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("preserveAspectRatio", "none");
    const grid = [0, 50, 100].map((y) => {
      const line = shape("line");
      for (const [key, value] of [["x1", 0], ["x2", 119], ["y1", y], ["y2", y]]) line.setAttribute(key, value);
      return line;
    });
    this.svg.setAttribute("viewBox", "0 0 119 100");
    this.fill = shape("path", "area");
    this.paths = names.slice(0, lines).map((_, place) => shape("path", place ? "two" : "one"));
    this.cross = shape("line", "cross");
    this.cross.setAttribute("y1", 0);
    this.cross.setAttribute("y2", 100);
    this.cross.setAttribute("visibility", "hidden");
    this.svg.append(...grid, this.fill, ...this.paths, this.cross);
    this.label = make("span", "top-label");
    this.label.setAttribute("aria-hidden", "true");
    this.axis = make("div", "axis", make("span", "", "2 min ago"), make("span", "", "now"));
    this.axis.setAttribute("aria-hidden", "true");
    this.plot = make("div", "plot", this.svg, this.label);
    this.element = make("div", "", this.plot, this.axis);
    this.at = null;
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerdown", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => { this.at = null; this.tell(); });
  }

  /** Draws columns of equal length, oldest first; null is a gap. */
  draw(...series) {
    this.series = series;
    const known = series.slice(0, this.paths.length).flat().filter((value) => value !== null);
    const top = this.round(Math.max(0, ...known));
    this.label.textContent = known.length ? this.show(top) : "";
    this.paths.forEach((path, place) => path.setAttribute("d", this.line(series[place], top)));
    this.fill.setAttribute("d", this.area ? this.under(series[0], top) : "");
    const parts = this.names.map((name, place) => {
      const values = series[place].filter((value) => value !== null);
      return values.length ? `${name} at last ${this.show(values.at(-1))}, at most ${this.show(Math.max(...values))}` : `${name}: nothing yet`;
    });
    this.svg.setAttribute("aria-label", `${this.title}, the last two minutes. ${parts.join("; ")}.`);
    this.tell();
  }

  y(value, top) {
    return (100 - 100 * Math.min(1, value / top)).toFixed(2);
  }

  line(values, top) {
    let path = "";
    let last = -Infinity;
    values.forEach((value, x) => {
      if (value === null) return;
      path += x - last <= JOIN ? `L${x} ${this.y(value, top)}` : `M${x} ${this.y(value, top)}h.01`;
      last = x;
    });
    return path;
  }

  /** The surface under each stretch without a gap. */
  under(values, top) {
    let path = "";
    let open = false;
    values.forEach((value, x) => {
      if (value === null) {
        if (open) path += `L${x - 1} 100Z`;
        open = false;
      } else {
        if (!open) path += `M${x} 100`;
        path += `L${x} ${this.y(value, top)}`;
        open = true;
      }
    });
    return open ? `${path}L${values.length - 1} 100Z` : path;
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    this.at = Math.max(0, Math.min(119, Math.round((119 * (event.clientX - box.left)) / box.width)));
    this.tell();
  }

  /** What the pointer is on, in the line below the chart. */
  tell() {
    const [left, right] = this.axis.children;
    this.cross.setAttribute("visibility", this.at === null ? "hidden" : "visible");
    if (this.at === null || !this.series.length) {
      left.textContent = "2 min ago";
      right.textContent = "now";
      return;
    }
    this.cross.setAttribute("x1", this.at);
    this.cross.setAttribute("x2", this.at);
    left.textContent = `${120 - this.at} s ago`;
    right.textContent = this.names
      .map((name, place) => `${name} ${this.series[place][this.at] === null ? "–" : this.show(this.series[place][this.at])}`)
      .join(" · ");
  }
}
