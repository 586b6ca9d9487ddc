"use strict";
// Unpacks the drawings and the samples, and shows them. Texts of a model only ever become text nodes.
(async () => {
  const byId = (id) => document.getElementById(id);
  const trouble = (text) => { byId("trouble").hidden = false; byId("trouble").textContent = text; };
  if (typeof DecompressionStream === "undefined") {
    trouble("This browser is too old for the page: it cannot unpack gzip. Use one of 2023 or later.");
    return;
  }
  const unpack = async (id) => {
    const bytes = Uint8Array.from(atob(byId(id).textContent.trim()), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const data = { samples: JSON.parse(await unpack("logged")) };
  const element = (name, text, title) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (title) made.title = title;
    return made;
  };
  const shown = (value) =>
    value === null || value === undefined ? "" : typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4)))
      : typeof value === "object" ? JSON.stringify(value) : String(value);

  // ---- Samples: list -----------------------------------------------------------------------------------------------

  const PAGE = 25;
  const runs = [...byId("of-run").options].slice(1).map((option) => option.textContent);
  const columns = ["suspicion", "step", "position", "sample", "reward", "advantage", "length", "finish_reason", "version", "prompt", "response", "answer"];
  if (runs.length > 1) columns.splice(1, 0, "run");
  const keyOf = { length: (s) => (s.tokens ? s.tokens.text.length : s.response.length), run: (s) => runs[s.run] };
  const valueOf = (sample, column) => (keyOf[column] ? keyOf[column](sample) : sample[column]);
  for (const sample of data.samples) {
    sample.searched = [sample.prompt, sample.response, shown(sample.answer), sample.status, ...sample.reasons, ...(sample.turns || []).map((turn) => turn.text)].join("\n").toLowerCase();
  }
  const view = { column: "suspicion", falls: true, page: 0, found: [], chosen: null };

  const compare = (one, two) => {
    const a = valueOf(one, view.column), b = valueOf(two, view.column);
    const isMissing = (value) => value === null || value === undefined;
    if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
    const order = typeof a === "number" && typeof b === "number" ? a - b : shown(a).localeCompare(shown(b));
    return (view.falls ? -order : order) || two.step - one.step;
  };
  const find = () => {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const run = byId("of-run").value;
    view.found = data.samples
      .filter((s) => (run === "" || s.run === Number(run)) && words.every((word) => s.searched.includes(word)))
      .sort(compare);
    view.page = 0;
    list();
  };
  const list = () => {
    const head = byId("list").tHead.rows[0];
    head.replaceChildren(...columns.map((column) => {
      const cell = element("th", column + (column === view.column ? (view.falls ? " \u25be" : " \u25b4") : ""));
      cell.dataset.column = column;
      cell.onclick = () => {
        view.falls = column === view.column ? !view.falls : true;
        view.column = column;
        find();
      };
      return cell;
    }));
    const first = view.page * PAGE;
    byId("list").tBodies[0].replaceChildren(...view.found.slice(first, first + PAGE).map((sample) => {
      const row = element("tr");
      for (const column of columns) {
        const value = shown(valueOf(sample, column));
        row.append(element("td", value.slice(0, 160), column === "suspicion" ? sample.reasons.join("; ") : ""));
      }
      row.classList.toggle("chosen", sample === view.chosen);
      row.onclick = () => { open(sample); list(); };
      return row;
    }));
    const last = Math.min(first + PAGE, view.found.length);
    byId("page").textContent = `${view.found.length ? first + 1 : 0} to ${last} of ${view.found.length}`;
    byId("previous").disabled = view.page === 0;
    byId("next").disabled = last >= view.found.length;
  };
  byId("search").oninput = find;
  byId("of-run").onchange = find;
  byId("previous").onclick = () => { view.page -= 1; list(); };
  byId("next").onclick = () => { view.page += 1; list(); };

  // ---- Samples: one ------------------------------------------------------------------------------------------------

  // Numbers are red below the middle of the scale and blue above it; the middle has no colour.
  const MIDDLES = { advantage: 0, ratio: 1, engine_ratio: 1 };
  const shade = (value, low, high, middle) => {
    if (value === null || value === undefined) return "";
    const side = value >= middle ? [value - middle, high - middle, "52,120,220"] : [middle - value, middle - low, "224,82,60"];
    return side[1] > 0 ? `rgba(${side[2]},${Math.min(1, side[0] / side[1]) * 0.75})` : "";
  };
  const paint = () => {
    const sample = view.chosen, by = byId("color").value, tokens = sample.tokens;
    const texts = tokens ? tokens.text : [sample.response];
    const values = (tokens ? tokens[by] : [sample[by]]) || [];
    const numbers = values.filter((value) => value !== null).map(Number);
    const extreme = (pick, start) => numbers.reduce((a, b) => pick(a, b), start);
    const low = extreme(Math.min, Infinity), high = extreme(Math.max, -Infinity);
    const middle = by in MIDDLES ? MIDDLES[by] : by === "mask" ? 0 : low;
    const reach = Math.max(Math.abs(high - middle), Math.abs(low - middle));
    byId("response").replaceChildren(...texts.map((text, index) => {
      const span = element("span", text, `${by} ${shown(values[index])}`);
      span.className = "token";
      const value = values[index] === null || values[index] === undefined ? null : Number(values[index]);
      span.style.backgroundColor = by === "mask" ? (value ? "" : "#cfd4da") : shade(value, middle - reach, middle + reach, middle);
      return span;
    }));
    byId("scale").textContent = !numbers.length ? `no ${by} logged` : by === "mask" ? "grey: not trained" : `${by} from ${shown(low)} to ${shown(high)}; blue is high, red is low`;
  };

  // A text that the policy only read has the marks of its chat template, which name the roles of its messages.
  const ROLE = /<\|im_start\|>(\w+)|<\|start_header_id\|>(\w+)|<start_of_turn>(\w+)|<\|(user|assistant|system|tool|observation)\|>/g;
  const CALL = /(<\|?tool_call(?:_begin\||_start\||)?>[^]*?(?:<\/tool_call>|<\|tool_call_end\|>|<tool_call\|>|$))/;
  const isOwn = (turn) => turn.is_own ?? turn.is_trained; // runs of earlier versions have no is_own
  const writer = (turn) => {
    if (isOwn(turn)) return "policy";
    const roles = [...turn.text.matchAll(ROLE)].map((found) => found.slice(1).find(Boolean));
    return [...new Set(roles)].filter((role) => role !== "assistant" && role !== "model").join(", ") || "not the policy";
  };
  const showTurns = (sample) => {
    const holder = byId("turns"), turns = sample.turns || [];
    holder.hidden = !turns.length;
    holder.replaceChildren(element("h4", "Turns"), ...turns.map((turn) => {
      const block = element("div"), text = element("pre");
      const reward = turn.reward === undefined ? "" : `, reward ${shown(turn.reward)}`;
      const head = turn.is_trained === undefined ? "" : `${writer(turn)}, ${turn.is_trained ? "trained" : "not trained"}${reward}`;
      block.className = turn.is_trained ? "turn trained" : "turn";
      text.append(...turn.text.split(isOwn(turn) ? CALL : /(?!)/).map((part, index) => {
        const span = element("span", part);
        span.className = index % 2 ? "call" : "";
        return span;
      }));
      block.append(element("b", head), text);
      return block;
    }));
  };
  const open = (sample) => {
    view.chosen = sample;
    byId("detail").hidden = false;
    byId("detail-title").textContent = `${runs.length > 1 ? runs[sample.run] + ", " : ""}step ${sample.step}, prompt ${sample.position}, sample ${sample.sample}`;
    const kinds = sample.tokens ? Object.keys(sample.tokens).filter((name) => name !== "text" && name !== "ids") : ["advantage", "version"];
    const before = byId("color").value;
    byId("color").replaceChildren(...kinds.map((name) => element("option", name)));
    if (kinds.includes(before)) byId("color").value = before;
    byId("prompt").textContent = sample.prompt;
    paint();
    showTurns(sample);
    const skipped = new Set(["prompt", "response", "tokens", "searched", "run", "reasons", "turns"]);
    const rows = Object.entries(sample).filter(([name]) => !skipped.has(name)).map(([name, value]) => [name, shown(value)]);
    rows.push(...sample.reasons.map((reason) => ["suspicious", reason]));
    byId("fields").tBodies[0].replaceChildren(...rows.map(([name, value]) => {
      const row = element("tr");
      row.append(element("th", name), element("td", value));
      return row;
    }));
    const group = data.samples.filter((s) => s.run === sample.run && s.step === sample.step && s.position === sample.position);
    byId("siblings").tBodies[0].replaceChildren(...group.map((other) => {
      const row = element("tr");
      row.append(element("td", `sample ${other.sample}`), element("td", `reward ${shown(other.reward)}`), element("td", `advantage ${shown(other.advantage)}`), element("td", other.response.slice(0, 200)));
      row.classList.toggle("chosen", other === sample);
      row.onclick = () => { open(other); list(); };
      return row;
    }));
  };
  byId("color").onchange = paint;

  // ---- Groups ------------------------------------------------------------------------------------------------------

  const groups = new Map();
  for (const sample of data.samples) {
    const key = `${sample.run} ${sample.step} ${sample.position}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(sample);
  }
  const several = [...groups.values()].filter((group) => group.length > 1);
  const equal = several.filter((group) => group.every((s) => s.reward === group[0].reward));
  byId("groups-note").textContent = `${equal.length} of ${several.length} group${several.length === 1 ? "" : "s"} of which several samples are shown. ` +
    "The curve reward/equal_groups counts all groups of a step; the list shows the newest 200 of the logged ones.";
  byId("equal").tBodies[0].replaceChildren(...equal.sort((a, b) => b[0].step - a[0].step).slice(0, 200).map((group) => {
    const row = element("tr");
    row.append(element("td", shown(group[0].step)), element("td", group[0].prompt.slice(0, 200)), element("td", shown(group.length)), element("td", shown(group[0].reward)));
    row.onclick = () => { open(group[0]); byId("detail").scrollIntoView(); };
    return row;
  }));
  find();
  if (view.found.length) { open(view.found[0]); list(); }

  // ---- Curves: those of a section when it is opened ----------------------------------------------------------------

  const library = document.createElement("script");
  library.nonce = document.currentScript ? document.currentScript.nonce : byId("library").nonce;
  library.textContent = await unpack("library");
  document.head.append(library);
  const charts = JSON.parse(await unpack("charts"));
  const draw = async (section) => {
    for (const place of section.querySelectorAll(".chart:empty")) {
      await Bokeh.embed.embed_item(charts[Number(place.dataset.number)], place);
    }
  };
  for (const section of document.querySelectorAll("details.charts")) {
    section.addEventListener("toggle", () => section.open && draw(section));
    if (section.open) await draw(section);
  }
  document.body.dataset.ready = "yes";
})();
