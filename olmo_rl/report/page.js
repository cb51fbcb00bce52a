// The sections of the report, in the order in which someone in a hurry reads them.

const MAIN_METRICS = [
  "reward/mean", "rollouts/response_tokens", "policy/entropy", "mismatch/mean", "loss/clip_high", "grad/norm",
  "packing/fill", "time/update_s", "throughput/real_tokens_per_second",
];
const WORDS = { good: "good", warn: "look", bad: "bad", unknown: "unknown" };

function heading(data, words) {
  const dark = () => document.documentElement.dataset.theme === "dark";
  const button = el("button", { type: "button", on: { click: () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    button.textContent = dark() ? "Light" : "Dark";
  } } }, dark() ? "Light" : "Dark");
  document.getElementById("header").append(
    el("h1", {}, data.name), el("span", { class: "dim" }, words), el("span", { class: "spacer" }), button,
    el("div", { class: "dim path" }, data.path));
}

function section(id, title, ...content) {
  document.getElementById("sections").append(el("a", { href: `#${id}` }, title));
  document.getElementById("main").append(el("section", { "aria-labelledby": id }, el("h2", { id }, title), ...content));
}

function notesOf(notes) {
  return notes.length ? el("div", { class: "callout" }, notes.map((note) => el("div", {}, note))) : null;
}

function healthSection(data) {
  section("health", "Health",
    el("p", { class: "verdict" }, data.verdict),
    el("ul", { class: "health" }, data.health.map(([level, title, found, advice]) => el("li", {},
      el("span", { class: `level ${level}` }, WORDS[level]), el("b", {}, title),
      el("span", { class: "found" }, found, advice ? el("span", { class: "advice" }, `Try: ${advice}`) : null)))),
    notesOf(data.notes));
}

function curve(data, name) {
  const lines = [];
  if (data.series[name]) lines.push({ name: data.name, steps: data.series[name][0], values: data.series[name][1] });
  const other = data.other && data.other.series[name];
  if (other) lines.push({ name: data.other.name, steps: other[0], values: other[1], color: color(1) });
  if (name === "reward/mean" && data.evaluations.length) {
    const known = data.evaluations.filter((pair) => pair[1] !== null);
    if (known.length) lines.push({ name: "held out", steps: known.map((p) => p[0]), values: known.map((p) => p[1]), dots: true, color: color(2) });
  }
  const caption = name === "reward/mean" && lines.length > 1 && !data.other ? `${name}, held-out reward` : name;
  return lines.length ? lineChart(caption, lines) : null;
}

function curvesSection(data) {
  const names = [...new Set([...Object.keys(data.series), ...Object.keys((data.other || {}).series || {})])].sort();
  const main = MAIN_METRICS.map((name) => curve(data, name)).filter((figure) => figure);
  if (!main.length) {
    section("curves", "Curves", el("p", {}, "No update has been logged yet."));
    return;
  }
  const areas = new Map();
  for (const name of names.filter((one) => !MAIN_METRICS.includes(one))) {
    const area = name.split("/")[0];
    areas.set(area, [...(areas.get(area) || []), name]);
  }
  const more = [...areas].map(([area, members]) => {
    const box = el("details", {}, el("summary", {}, `${area} (${members.length})`));
    box.addEventListener("toggle", () => {  // drawn when first opened: a hundred curves take their time
      if (box.open && box.children.length === 1) {
        box.append(el("div", { class: "grid" }, members.map((name) => curve(data, name)).filter((figure) => figure)));
      }
    });
    return box;
  });
  section("curves", "Curves", data.other ? legend([data.name, data.other.name]) : null,
    el("div", { class: "grid" }, main), el("h3", {}, "All other metrics"), more);
}

function timeSection(data) {
  const time = data.time;
  if (time.seconds === null) {
    section("time", "Time", el("p", {}, "No seconds of updates have been logged yet."));
    return;
  }
  const content = [
    el("p", {}, `A step takes ${show(time.seconds)} s, most of it ${time.largest}.`),
    time.straggler ? el("div", { class: "callout bad" }, `${time.straggler}.`) : null,
    el("div", { class: "callout" }, el("b", {}, "The one change to try: "), `${time.advice}.`),
    stackedBars("Seconds by phase", time.steps, time.phases),
  ];
  if (time.why.length) {
    content.push(el("h3", {}, "The slowest updates"),
      table(["update", "seconds", "why"], time.why, ["number", "number", ""]));
  }
  if (time.ranks.length) {
    content.push(el("h3", {}, "Ranks"),
      el("p", { class: "dim" }, "A rank makes others wait where it begins late, has more to compute, or takes longer " +
        "for an optimizer step, which is equal work on all ranks."),
      table(["rank", "begins late, s", "begins last", "CPU s an update", "optimizer, s", "tokens", "forward, s", "backward, s"],
        time.ranks.map((rank) => [rank.rank, rank.late, percent(rank.last), rank.busy, rank.optimizer, rank.tokens,
          rank.phases.forward ?? null, rank.phases.backward ?? null]), Array(8).fill("number")));
  }
  section("time", "Time", ...content);
}

function packMap(update) {
  const largest = Math.max(...update.ranks.flatMap((rank) => rank.packs.map((pack) => pack.rows)));
  // Of a budget that nothing comes near only the part in use is drawn.
  const budget = largest < 0.4 * update.budget ? 1.1 * largest : update.budget;
  const widest = Math.max(budget, largest);
  return el("div", { class: "packs" }, update.ranks.slice(0, 64).map((rank) => el("div", { class: "rank" },
    el("span", { class: "dim" }, `rank ${rank.rank}`),
    el("div", {}, rank.packs.slice(0, 32).map((pack, column) => {
      const used = pack.lengths.reduce((sum, length) => sum + length, 0);
      const bar = el("div", { class: "pack", role: "img", style: `width:${(100 * Math.max(pack.rows, budget)) / widest}%`,
        "aria-label": `rank ${rank.rank}, pack ${column}: ${pack.lengths.length} documents, ${used} of ${update.budget} tokens` });
      pack.lengths.forEach((length, i) => bar.append(el("span", {
        style: `flex:${length} 0 0;background:${color(pack.groups[i])}`,
        title: `${length} tokens, group ${pack.groups[i]}`,
      })));
      const room = Math.max(pack.rows, budget) - used;
      if (room > 0) bar.append(el("span", { class: "pad", style: `flex:${room} 0 0`, title: `${room} tokens free or padding` }));
      return bar;
    })))));
}

function packsSection(data) {
  if (!data.packs.length) return;
  const place = el("div", {});
  const words = el("span", { class: "dim" });
  const draw = (index) => {
    const update = data.packs[index];
    words.textContent = `${update.ranks.length} ranks, budget ${show(update.budget)} tokens, fill ${percent(update.fill)}`;
    place.replaceChildren(packMap(update));
  };
  const choice = el("select", { "aria-label": "Update whose packs are shown", on: { change: () => draw(choice.selectedIndex) } },
    data.packs.map((update) => el("option", {}, `update ${update.step}`)));
  draw(0);
  section("packs", "Packs",
    el("p", { class: "dim" }, "One bar is one forward of a rank: documents in the colour of their group, room that no document uses hatched."),
    el("div", { class: "controls" }, choice, words), place);
}

function expertsSection(data) {
  const { loads, entropies, ends } = data.experts;
  const content = [];
  if (loads.length) {
    const last = loads[loads.length - 1];
    const layers = last.layers.map((layer) => `layer ${layer}`);
    if (last.after) {
      const before = last.before || (last.planned ? last.after.map(() => null) : last.after);
      content.push(heatMap(
        `Busiest over mean destination in update ${last.step}` + (last.planned ? "" : ": the order of arrival was kept"),
        ["order of arrival", "as trained"], layers.map((name, i) => [name, [before[i], last.after[i]]]), (v) => v - 1, show));
    }
    const shares = last.observed.map((row) => {
      const mean = row.reduce((sum, value) => sum + value, 0) / row.length;
      return row.map((value) => (mean ? value / mean : null));
    });
    content.push(heatMap(`Load of every destination over the mean, update ${last.step}`,
      shares[0].map((_, i) => `rank ${i}`), layers.map((name, i) => [name, shares[i]]), (v) => v - 1,
      shares[0].length <= 16 ? show : null));
  }
  if (entropies.length) {
    content.push(heatMap(`Evenness of recorded experts by layer, updates ${ends[0]} to ${ends[1]} (1 is even; red is uneven)`, null,
      entropies.map((values, i) => [`routed layer ${i}`, values]), (v) => 1 - v, null));
  }
  if (content.length) section("experts", "Experts", el("div", { class: "grid" }, content));
}

function mismatchSection(data) {
  if (!Object.keys(data.mismatch).length) return;
  const order = ["all", "first", "last"].filter((name) => data.mismatch[name]);
  section("mismatch", "Engine agreement",
    histogram("Tokens by |log-prob of trainer - engine|, nats", Object.fromEntries(order.map((name) => [name, data.mismatch[name]]))));
}

function tokensOf(sample) {
  if (!sample.pieces) return [sample.response ?? "(no text recorded)"];
  const more = sample.tokens - sample.pieces.length;  // pieces are kept of the first tokens alone
  const end = more > 0 ? [el("span", { class: "dim" }, ` [${show(more)} more tokens]`)] : [];
  return sample.pieces.map((piece, i) => {
    const gap = sample.gaps[i];
    if (gap === null || gap === undefined) return el("span", { class: "dim" }, piece);
    const depth = Math.min(1, Math.sqrt(Math.abs(gap) / 0.5));
    const tone = gap < 0 ? "var(--below)" : "var(--above)";
    return el("span", { class: "token", style: `background: rgba(${tone}, ${(0.75 * depth).toFixed(3)})`,
      title: `trainer - engine ${show(gap)} nats` }, piece === "" ? "\u220e" : piece);
  }).concat(end);
}

function sampleCard(sample) {
  const fact = (name, value) => el("span", {}, `${name} `, el("b", {}, show(value)));
  return el("article", { class: "sample" },
    el("div", { class: "facts" }, fact("reward", sample.reward), fact("advantage", sample.advantage), fact("update", sample.step),
      fact("tokens", sample.tokens), fact("finish", sample.finish_reason), fact("version", sample.policy_version),
      sample.reward_parts ? fact("parts", sample.reward_parts) : null),
    el("div", { class: "text dim", tabindex: "0", role: "group", "aria-label": "prompt" }, sample.prompt ?? "(no prompt recorded)"),
    el("div", { class: "text", tabindex: "0", role: "group", "aria-label": "response" }, tokensOf(sample)));
}

function samplesSection(data) {
  if (!data.samples.length) return;
  const least = (value) => (value === null ? -Infinity : value);
  const meanGap = (sample) => {
    const known = sample.gaps.filter((gap) => gap !== null);
    return known.length ? known.reduce((sum, gap) => sum + Math.abs(gap), 0) / known.length : 0;
  };
  const orders = {
    "highest reward first": (a, b) => least(b.reward) - least(a.reward),
    "lowest reward first": (a, b) => least(a.reward) - least(b.reward),
    "newest first": (a, b) => b.step - a.step,
    "longest first": (a, b) => b.tokens - a.tokens,
    "largest gap first": (a, b) => meanGap(b) - meanGap(a),
  };
  const list = el("div", {});
  let shown = 8;
  const more = el("button", { type: "button", on: { click: () => { shown += 16; draw(); } } }, "Show more");
  const draw = () => {
    const sorted = [...data.samples].sort(orders[choice.value]);
    list.replaceChildren(...sorted.slice(0, shown).map(sampleCard));
    more.hidden = shown >= sorted.length;
  };
  const choice = el("select", { "aria-label": "Order of the generations", on: { change: draw } },
    Object.keys(orders).map((name) => el("option", { value: name }, name)));
  draw();
  section("generations", "Generations",
    el("p", { class: "dim" }, "Tokens are shaded by trainer - engine log-prob: red where the trainer finds a token likelier, blue where less, " +
      "full at half a nat."),
    el("div", { class: "controls" }, choice, el("span", { class: "dim" }, `${data.samples.length} kept`)), list, more);
}

function settingsSection(data) {
  const content = [];
  if (data.other) {
    content.push(el("h3", {}, "Settings that differ"),
      data.settings_differ.length
        ? table(["key", data.name, data.other.name], data.settings_differ, ["key", "", ""])
        : el("p", {}, "None."),
      el("h3", {}, "Metrics, mean of the last tenth"),
      table(["metric", data.name, data.other.name], data.differences, ["key", "number", "number"]),
      notesOf(data.other.notes));
  }
  if (data.overrides.length) content.push(el("h3", {}, "As typed"), el("p", { class: "text" }, data.overrides.join(" ")));
  const all = el("details", {}, el("summary", {}, `All ${data.settings.length} settings`),
    table(["key", "value"], data.settings.map(([key, value]) => [key, value === null ? "null" : String(value)]), ["key", "key"]));
  section("settings", "Settings", ...content, all);
}

function runPage(data) {
  const planned = data.planned ? ` of ${data.planned}` : "";
  heading(data, `${data.updates}${planned} updates, ${data.status}`);
  if (data.other) document.getElementById("header").append(el("div", { class: "path dim" }, `compared with ${data.other.path}: ${data.other.verdict}`));
  for (const draw of [healthSection, curvesSection, timeSection, packsSection, expertsSection, mismatchSection, samplesSection, settingsSection]) draw(data);
}

function sweepPage(data) {
  heading(data, `sweep of ${data.jobs.length} runs`);
  const names = data.jobs.map((job) => job.name);
  section("jobs", "Runs", table(
    ["run", ...data.keys, "verdict", "updates", "held out", ...data.metrics],
    data.jobs.map((job, i) => [el("span", { class: "whole" }, el("span", { class: "swatch", style: `background:${color(i)}` }), job.name),
      ...job.settings.map((value) => (value === null ? "null" : String(value))), job.verdict, job.updates, job.accuracy,
      ...data.metrics.map((name) => job.values[name])]),
    ["", ...data.keys.map(() => "key"), "", "number", "number", ...data.metrics.map(() => "number")]));
  const figures = data.metrics.map((name) => {
    const lines = data.jobs.map((job, i) => ({ job, i })).filter(({ job }) => job.series[name])
      .map(({ job, i }) => ({ name: job.name, steps: job.series[name][0], values: job.series[name][1], color: color(i) }));
    return lines.length ? lineChart(name, lines) : null;
  }).filter((figure) => figure);
  section("curves", "Curves", legend(names), el("div", { class: "grid" }, figures));
  if (data.jobs.some((job) => job.notes.length)) section("notes", "Notes", ...data.jobs.map((job) => (job.notes.length ? el("div", {}, el("h3", {}, `run ${job.name}`), notesOf(job.notes)) : null)));
}

if (!document.documentElement.dataset.theme) {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}
const DATA = JSON.parse(document.getElementById("data").textContent);
(DATA.kind === "sweep" ? sweepPage : runPage)(DATA);
document.documentElement.dataset.drawn = "true";
