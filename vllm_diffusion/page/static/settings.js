// Controls for what a request may set, made from what the server says of its model, and the link.

// What any model takes besides the settings of its canvases.
const TEMPERATURE = {
  name: "temperature", meaning: "of the draws; 0 takes the likeliest token", low: 0, high: 2, is_integer: false,
};

function titled(name) {
  const words = name.replace(/^diffusion_/, "").replaceAll("_", " ");
  return words[0].toUpperCase() + words.slice(1);
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
    const own = setting.default ? `the server's: ${setting.default}` : "the server's";
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

// The controls of one choice of settings, in a fieldset.
export class Choice {
  constructor(fieldset) {
    this.fieldset = fieldset;
    this.controls = new Map();
  }

  // Make the controls anew for a model, as described by the server.
  describe(model) {
    for (const old of this.fieldset.querySelectorAll(".field, details")) old.remove();
    this.controls.clear();
    const more = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = "More";
    more.append(summary);
    for (const setting of [TEMPERATURE, ...model.settings]) {
      const isCommon = ["temperature", "diffusion_preset", "diffusion_max_steps"].includes(setting.name);
      (isCommon ? this.fieldset : more).append(this.#field(setting));
    }
    if (more.childElementCount > 1) this.fieldset.append(more);
  }

  #field(setting) {
    const id = `${this.fieldset.id}-${setting.name}`;
    const field = document.createElement("div");
    const label = document.createElement("label");
    const hint = document.createElement("small");
    const control = controlOf(setting);
    field.className = "field";
    label.htmlFor = control.id = id;
    label.textContent = titled(setting.name);
    hint.id = `${id}-hint`;
    hint.textContent = setting.meaning.replaceAll("`", "") + bounds(setting);
    control.setAttribute("aria-describedby", hint.id);
    field.append(label, control, hint);
    this.controls.set(setting.name, control);
    return field;
  }

  // What is set, by name; what is left to the server is left out.
  values() {
    const values = {};
    for (const [name, control] of this.controls) {
      if (control.value !== "") values[name] = control.type === "number" ? Number(control.value) : control.value;
    }
    return values;
  }

  // Set what is named, and leave the rest to the server. Returns the names that the model does not have.
  fill(values) {
    for (const control of this.controls.values()) control.value = "";
    const unknown = [];
    for (const [name, value] of Object.entries(values)) {
      const control = this.controls.get(name);
      if (control) control.value = value;
      if (!control || control.value === "") unknown.push(name);
    }
    return unknown;
  }
}

// The first control whose value may not be sent, and why; null if all may.
export function mistakeIn(controls) {
  for (const control of controls) {
    if (control.type === "number" && !control.validity.valid) {
      const [label] = control.labels;
      const noun = control.step === "any" ? "a number" : "a whole number";
      const upTo = control.max === "" ? "" : ` and at most ${number(Number(control.max))}`;
      const rule = `must be ${noun} of at least ${number(Number(control.min))}${upTo}`;
      return { control, sentence: `Settings: ${label.textContent} ${rule}.` };
    }
  }
  return null;
}

// In a few words, for a heading.
export function inWords(values) {
  const words = Object.entries(values).map(([name, value]) => `${titled(name).toLowerCase()} ${value}`);
  return words.join(", ") || "the server's own";
}

// A question and what it is asked with, as the fragment of an address, which is sent to no server.
export function fragmentOf({ model, turns, prompt, seed, maxTokens, choices }) {
  const fields = new URLSearchParams({ model, prompt, seed, max_tokens: maxTokens });
  for (const turn of turns) fields.append("turn", turn.content);
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
    // A user's and the model's in turn, as they were said.
    turns: fields.getAll("turn").map((content, i) => ({ role: i % 2 ? "assistant" : "user", content })),
    prompt: fields.get("prompt"),
    seed: fields.get("seed") ?? "0",
    maxTokens: fields.get("max_tokens") ?? "256",
    choices: fields.has("compare") ? choices : choices.slice(0, 1),
  };
}
