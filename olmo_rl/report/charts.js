"use strict";
// Drawing of the report: elements, numbers, curves, bars, heat maps. Everything is SVG or HTML made here; texts
// of a run are set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function el(name, attributes, ...children) {
  const node = document.createElement(name);
  return filledNode(node, attributes, children);
}

function svg(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  return filledNode(node, attributes, children);
}

function filledNode(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function show(value) {
  if (value === null || value === undefined) return "unknown";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(4)));
}

// On an axis, where room is short.
function brief(value) {
  return Math.abs(value) >= 1000 || value === 0 ? show(value) : show(Number(value.toPrecision(3)));
}

function percent(share) {
  return share === null || share === undefined ? "unknown" : `${Math.round(share * 100)} %`;
}

function color(index) {
  return `var(--c${index % 11})`;
}

// Round limits around values; equal values get room on both sides.
function limits(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  if (low === high) {
    const room = low === 0 ? 1 : Math.abs(low) * 0.1;
    return [low - room, high + room];
  }
  return [low, high];
}

// `lines`: [{name, steps, values, dots}]. The cursor follows the pointer, or arrow keys once focused.
function lineChart(title, lines, options) {
  const width = 340, height = 150, left = 46, right = 8, top = 8, bottom = 20;
  const [low, high] = limits(lines.flatMap((line) => line.values));
  const [first, last] = limits(lines.flatMap((line) => line.steps));
  const x = (step) => left + ((step - first) / (last - first)) * (width - left - right);
  const y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
  const label = el("span", { class: "value" });
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0",
    "aria-label": `${title} over updates, from ${show(low)} to ${show(high)}; arrow keys read values`,
  });
  for (const value of [low, (low + high) / 2, high]) {
    picture.append(
      svg("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, brief(value)));
  }
  picture.append(
    svg("text", { x: left, y: height - 5 }, show(Math.ceil(first))),
    svg("text", { x: width - right, y: height - 5, "text-anchor": "end" }, show(Math.floor(last))));
  lines.forEach((line, index) => {
    const stroke = line.color || color(index);
    const points = line.values.map((value, i) => `${x(line.steps[i]).toFixed(1)},${y(value).toFixed(1)}`);
    if (points.length > 1) {
      picture.append(svg("polyline", { points: points.join(" "), fill: "none", stroke, "stroke-width": 1.4 }));
    }
    if (line.dots || points.length === 1) {
      line.values.forEach((value, i) =>
        picture.append(svg("circle", { cx: x(line.steps[i]), cy: y(value), r: 2.5, fill: stroke })));
    }
  });
  const cursor = svg("line", { class: "axis", y1: top, y2: height - bottom, visibility: "hidden" });
  picture.append(cursor);
  let place = lines[0].values.length - 1;
  const read = (index) => {
    const main = lines[0];
    place = Math.max(0, Math.min(main.values.length - 1, index));
    const step = main.steps[place];
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("visibility", "visible");
    label.textContent = `${step}: ` + lines.map((line) => show(nearest(line, step))).join(" | ");
  };
  const rest = () => {
    cursor.setAttribute("visibility", "hidden");
    label.textContent = lines.map((line) => show(line.values[line.values.length - 1])).join(" | ");
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const step = first + ((((event.clientX - box.left) / box.width) * width - left) / (width - left - right)) * (last - first);
    read(nearestPlace(lines[0].steps, step));
  });
  picture.addEventListener("pointerleave", rest);
  picture.addEventListener("blur", rest);
  picture.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    read(place + move);
  });
  rest();
  const caption = el("figcaption", {}, el("b", {}, title), label);
  return el("figure", options || {}, caption, picture);
}

function nearestPlace(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

function nearest(line, step) {
  return line.values[nearestPlace(line.steps, step)];
}

function legend(names) {
  return el("div", { class: "legend" }, names.map((name, index) =>
    el("span", {}, el("span", { class: "swatch", style: `background:${color(index)}` }), name)));
}

// Stacked bars over updates: `parts` {name: values}.
function stackedBars(title, steps, parts) {
  const names = Object.keys(parts), width = 1100, height = 230, left = 52, bottom = 20, top = 14;
  const totals = steps.map((_, i) => names.reduce((sum, name) => sum + parts[name][i], 0));
  // A first update that loads kernels would press all others flat: what rises far above the rest is cut off.
  const middle = [...totals].sort((a, b) => a - b)[totals.length >> 1];
  const usual = totals.filter((total) => total <= 3 * middle);
  const high = (usual.length >= 0.8 * totals.length ? Math.max(...usual) : Math.max(...totals)) || 1;
  const y = (value) => top + (1 - value / high) * (height - top - bottom);
  const step = (width - left) / steps.length;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const value of [0, high / 2, high]) {
    picture.append(
      svg("line", { class: "axis", x1: left, x2: width, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, `${brief(value)} s`));
  }
  steps.forEach((number, i) => {
    let base = 0;
    const bar = svg("g", {});
    names.forEach((name, index) => {
      const value = parts[name][i];
      if (value <= 0) return;
      bar.append(svg("rect", {
        x: left + i * step + step * 0.08, width: Math.max(0.5, Math.min(40, step * 0.84)),
        y: y(Math.min(high, base + value)), height: Math.max(0, y(Math.min(high, base)) - y(Math.min(high, base + value))),
        fill: color(index),
      }));
      base += value;
    });
    bar.append(svg("title", {}, `update ${number}: ${show(totals[i])} s\n` +
      names.map((name) => `${name} ${show(parts[name][i])} s`).join("\n")));
    if (totals[i] > high) {
      bar.append(svg("text", { x: left + i * step + 2, y: top - 1 }, `${brief(totals[i])} s`));
    }
    picture.append(bar);
  });
  picture.append(
    svg("text", { x: left, y: height - 5 }, `update ${steps[0]}`),
    svg("text", { x: width, y: height - 5, "text-anchor": "end" }, `from update ${steps[steps.length - 1]}`));
  return el("figure", {}, el("figcaption", {}, el("b", {}, title)), legend(names), el("div", { class: "wide" },
    el("div", { style: "min-width:560px" }, picture)));
}

// Bars of shares over bins: `series` {name: [[bin, share]]}; bins are tenths of a decade from 1e-8.
function histogram(title, series) {
  const names = Object.keys(series), width = 700, height = 200, left = 46, bottom = 22, top = 8;
  const bins = names.flatMap((name) => series[name].map((pair) => pair[0]));
  const [from, to] = [Math.min(...bins), Math.max(...bins) + 1];
  const high = Math.max(...names.flatMap((name) => series[name].map((pair) => pair[1])));
  const x = (bin) => left + ((bin - from) / (to - from)) * (width - left - 8);
  const y = (share) => top + (1 - share / high) * (height - top - bottom);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const share of [0, high / 2, high]) {
    picture.append(
      svg("line", { class: "axis", x1: left, x2: width - 8, y1: y(share), y2: y(share) }),
      svg("text", { x: left - 5, y: y(share) + 4, "text-anchor": "end" }, `${brief(share * 100)} %`));
  }
  for (let bin = Math.ceil(from / 10) * 10; bin <= to; bin += 10) {
    picture.append(svg("text", { x: x(bin), y: height - 5, "text-anchor": "middle" }, `1e${bin / 10 - 8}`));
  }
  names.forEach((name, index) => {
    const points = series[name].map(([bin, share]) => `${x(bin + 0.5).toFixed(1)},${y(share).toFixed(1)}`);
    if (name === "all") {
      for (const [bin, share] of series[name]) {
        picture.append(svg("rect", {
          x: x(bin), y: y(share), width: Math.max(1, x(bin + 1) - x(bin) - 1), height: y(0) - y(share),
          fill: color(index), "fill-opacity": 0.45,
        }, svg("title", {}, `${Math.pow(10, bin / 10 - 8.1).toExponential(1)} to ` +
          `${Math.pow(10, bin / 10 - 8).toExponential(1)} nats: ${show(share * 100)} %`)));
      }
    } else {
      picture.append(svg("polyline", { points: points.join(" "), fill: "none", stroke: color(index), "stroke-width": 1.6 }));
    }
  });
  return el("figure", { class: "medium" }, el("figcaption", {}, el("b", {}, title)),
    legend(names.map((name) => (name === "all" ? "all updates" : `${name} update`))), picture);
}

// `rows`: [[label, values]], `shade(value)` in [-1, 1]: below 0 has the other colour.
function heatMap(title, columns, rows, shade, format) {
  const wide = rows.length ? rows[0][1].length : 0;
  const cells = el("div", {
    class: format ? "cells" : "cells dense", style: `grid-template-columns: max-content repeat(${wide}, minmax(${format ? 44 : 3}px, 1fr))`,
  });
  if (columns) cells.append(el("div", { class: "head" }), ...columns.map((name) => el("div", { class: "head" }, name)));
  for (const [name, values] of rows) {
    cells.append(el("div", { class: "head" }, name));
    for (const value of values) {
      const depth = value === null ? 0 : Math.max(-1, Math.min(1, shade(value)));
      const tone = depth < 0 ? "var(--below)" : "var(--above)";
      cells.append(el("div", {
        style: `background: rgba(${tone}, ${(0.06 + 0.74 * Math.abs(depth)).toFixed(3)})`, title: `${name}: ${show(value)}`,
      }, format ? format(value) : ""));
    }
  }
  return el("figure", {}, el("figcaption", {}, el("b", {}, title)), el("div", { class: "wide" }, cells));
}

function table(heads, rows, kinds) {
  const kind = (i) => (kinds && kinds[i]) || "";
  return el("div", { class: "wide" }, el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", { class: kind(i), scope: "col" }, head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) =>
      el("td", { class: kind(i) }, cell instanceof Node ? cell : show(cell))))))));
}
