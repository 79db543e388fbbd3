// Controls for what a request may set, made from what the server reports of its model, and the link.

// Shown at once, in this order; the rest is under "More".
const COMMON = ["diffusion_rule", "diffusion_preset", "temperature", "diffusion_max_steps"];
// What any model takes besides the settings of its canvases.
const TEMPERATURE = {
  name: "temperature", meaning: "of the draws; 0 takes the likeliest token", low: 0, high: 2, is_integer: false,
};

function titled(name) {
  if (name === "diffusion_rule") return "Way to decode";
  const title = name.replace(/^diffusion_/, "").replaceAll("_", " ");
  return title[0].toUpperCase() + title.slice(1);
}

function number(value) {
  return Number(value.toPrecision(4)).toString();
}

// What a setting may be, unless that is whatever its kind of number holds.
function bounds({ words, low, high }) {
  if (words) return "";
  const from = low > 0 && low < 1e-6 ? "above 0" : `from ${number(low)}`;
  return high < 1e9 ? ` (${from} to ${number(high)})` : ` (${from})`;
}

function controlOf(setting) {
  if (setting.words) {
    const control = document.createElement("select");
    const own = setting.default ? `${setting.default} (the server's)` : "the server's";
    control.append(new Option(own, ""), ...setting.words.map((word) => new Option(word, word)));
    return control;
  }
  const control = document.createElement("input");
  control.type = "number";
  control.min = setting.low;
  control.max = setting.high;
  control.step = setting.is_integer ? "1" : "any";
  control.placeholder = setting.default == null ? "the server's" : `${setting.default}`;
  return control;
}

export function element(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// One setting: a control for choice A, one for choice B, and what it means.
class Row {
  constructor(setting) {
    this.name = setting.name;
    this.title = titled(setting.name);
    this.controls = [controlOf(setting), controlOf(setting)];
    this.mark = element("span", { className: "mark", id: `${this.name}-mark` });
    const hint = element("small", { id: `${this.name}-hint` },
      setting.meaning.replaceAll("`", "") + bounds(setting));
    const label = element("label", { htmlFor: `${this.name}-a` }, this.title);
    const choices = this.controls.map((control, index) => {
      control.id = `${this.name}-${"ab"[index]}`;
      control.setAttribute("aria-describedby", `${hint.id} ${this.mark.id}`);
      const letter = element("span", { className: "letter", ariaHidden: "true" }, "AB"[index]);
      return element("div", { className: "choice" }, letter, control);
    });
    this.node = element("div", { className: "field" }, label, this.mark, ...choices, hint);
  }

  get differs() {
    return this.controls[0].value !== this.controls[1].value;
  }

  // Show one choice or both, and mark the setting where they differ.
  show(compares) {
    this.controls.forEach((control, index) => {
      control.setAttribute("aria-label", compares ? `${this.title} (${"AB"[index]})` : this.title);
      control.parentElement.hidden = index > 0 && !compares;
    });
    const isMarked = compares && this.differs;
    this.node.classList.toggle("differs", isMarked);
    this.mark.textContent = isMarked ? "A and B differ" : "";
  }
}

// What a request may set, for one choice of settings or for two that are compared.
export class Settings {
  constructor(node, compare) {
    this.node = node;
    this.compare = compare;
    this.rows = [];
    for (const control of [node, compare]) control.addEventListener("input", () => this.show());
  }

  // Make the controls anew for a model, as described by the server.
  describe(model) {
    this.rows = [TEMPERATURE, ...model.settings].map((setting) => new Row(setting));
    const common = COMMON.flatMap((name) => this.rows.filter((row) => row.name === name));
    const rare = this.rows.filter((row) => !common.includes(row));
    this.node.replaceChildren(...common.map((row) => row.node));
    if (rare.length) this.node.append(element("details", {}, element("summary", {}, "More"), ...rare.map((row) => row.node)));
    this.show();
  }

  show() {
    this.node.classList.toggle("compares", this.compare.checked);
    for (const row of this.rows) row.show(this.compare.checked);
  }

  get numChoices() {
    return this.compare.checked ? 2 : 1;
  }

  // Controls of what is requested.
  controls() {
    return this.rows.flatMap((row) => row.controls.slice(0, this.numChoices));
  }

  // What each choice sets, by name; what is left to the server is left out.
  choices() {
    return [0, 1].slice(0, this.numChoices).map((index) => {
      const values = {};
      for (const { name, controls } of this.rows) {
        const { value, type } = controls[index];
        if (value !== "") values[name] = type === "number" ? Number(value) : value;
      }
      return values;
    });
  }

  // Set what is named, and leave the rest to the server. Returns the names that the model does not have.
  fill(choices) {
    this.compare.checked = choices.length > 1;
    const unknown = new Set(choices.flatMap((values) => Object.keys(values)));
    for (const { name, controls } of this.rows) {
      controls.forEach((control, index) => { control.value = choices[index]?.[name] ?? ""; });
      if (choices.every((values, index) => controls[index].value === (values[name] ?? ""))) unknown.delete(name);
    }
    this.show();
    return [...unknown];
  }
}

// The first control whose value may not be sent, and why; null if all may.
export function mistakeIn(controls) {
  for (const control of controls) {
    if (control.type === "number" && !control.validity.valid) {
      const title = control.ariaLabel ?? control.labels[0].textContent;
      const noun = control.step === "any" ? "a number" : "a whole number";
      const upTo = control.max === "" ? "" : ` and at most ${number(Number(control.max))}`;
      const rule = `must be ${noun} of at least ${number(Number(control.min))}${upTo}`;
      return { control, sentence: `Settings: ${title} ${rule}.` };
    }
  }
  return null;
}

// What a choice sets, in a few words for a heading; what another one sets otherwise is marked.
export function inWords(values, other = values) {
  const names = [...new Set([...Object.keys(values), ...Object.keys(other)])].sort();
  const parts = names.flatMap((name) => {
    const title = titled(name).toLowerCase();
    const word = name in values ? `${title} ${values[name]}` : `the server's ${title}`;
    return [", ", values[name] === other[name] ? word : element("mark", {}, word)];
  });
  return parts.length ? parts.slice(1) : ["the server's own"];
}

// A question and its settings, as the fragment of an address, which is sent to no server.
export function fragmentOf({ model, system, turns, prompt, seed, maxTokens, choices }) {
  const fields = new URLSearchParams({ model, prompt, seed, max_tokens: maxTokens, ...(system && { system }) });
  // A picture is too long for an address.
  for (const { content } of turns) fields.append("turn", Array.isArray(content) ? content.at(-1).text : content);
  choices.forEach((values, index) => {
    if (index) fields.append("compare", "1");
    for (const [name, value] of Object.entries(values)) fields.append(`${"ab"[index]}.${name}`, value);
  });
  return `#${fields}`;
}

// The inverse; null where the fragment holds no prompt.
export function questionIn(fragment) {
  const fields = new URLSearchParams(fragment.slice(1));
  if (!fields.has("prompt")) return null;
  const choices = [{}, {}];
  for (const [name, value] of fields) {
    const of = { "a.": 0, "b.": 1 }[name.slice(0, 2)];
    if (of !== undefined) choices[of][name.slice(2)] = value;
  }
  return {
    model: fields.get("model"),
    system: fields.get("system") ?? "",
    // A user's and the model's in turn, as they were said.
    turns: fields.getAll("turn").map((content, i) => ({ role: i % 2 ? "assistant" : "user", content })),
    prompt: fields.get("prompt"),
    seed: fields.get("seed") ?? "0",
    maxTokens: fields.get("max_tokens") ?? "256",
    choices: fields.has("compare") ? choices : choices.slice(0, 1),
  };
}
