// The page of the live canvas: what its controls do.

import { Problem, WrongKey, chunksOf, describedModel } from "./client.js";
import { Panel, fillScale } from "./panel.js";
import { Choice, fragmentOf, inWords, mistakeIn, questionIn } from "./settings.js";

const at = (id) => document.getElementById(id);
const choices = [new Choice(at("choice-a")), new Choice(at("choice-b"))];
// Nowhere else: it is in no storage, no address and no file.
let key = "";
let model = null;
// Messages of the chat that were answered.
let turns = [];
let panels = [];
let stopping = null;

function say(sentence) {
  at("problem").textContent = sentence;
}

async function connect() {
  at("send").disabled = true;
  at("model").textContent = "Not connected.";
  const described = await describedModel(key);
  const isAnother = JSON.stringify(described) !== JSON.stringify(model);
  model = described;
  at("model").textContent =
    `${model.model} (${model.architecture}), canvases of ${model.canvas_length} tokens`;
  at("send").disabled = Boolean(stopping);
  say("");
  // A key that is entered anew leaves the chat and the settings as they are.
  if (!isAnother) return;
  at("max_tokens").max = model.max_model_len;
  at("max_tokens").value = Math.min(256, Math.floor(model.max_model_len / 2));
  for (const choice of choices) choice.describe(model);
  readLink();
}

// Fill the page with what its address holds. Nothing is sent before the user says so.
function readLink() {
  const question = questionIn(location.hash);
  if (!question || !model || stopping) return;
  clearChat();
  turns = question.turns;
  for (const turn of turns) addToLog(turn.role === "user" ? "You" : "Model", turn.content);
  at("prompt").value = question.prompt;
  at("seed").value = question.seed;
  at("max_tokens").value = question.maxTokens;
  at("compare").checked = question.choices.length > 1;
  showChoices();
  const unknown = new Set(question.choices.flatMap((values, index) => choices[index].fill(values)));
  const problems = [];
  if (question.model !== model.model) {
    problems.push(`Model: the link was made with ${question.model}, and this server has ${model.model}.`);
  }
  if (unknown.size) problems.push(`Settings: this model does not take ${[...unknown].join(", ")} of the link.`);
  say(problems.join(" "));
  at("prompt").focus();
}

function showChoices() {
  const compares = at("compare").checked;
  at("choice-b").hidden = !compares;
  at("choice-a").querySelector("legend").textContent = compares ? "Settings A" : "Settings";
}

function addToLog(who, text) {
  const entry = document.createElement("div");
  const name = document.createElement("b");
  const said = document.createElement("p");
  entry.className = who === "You" ? "entry you" : "entry";
  name.textContent = who;
  said.textContent = text;
  entry.append(name, said);
  at("log").append(entry);
  entry.scrollIntoView({ block: "nearest" });
  return said;
}

function clearChat() {
  turns = [];
  at("log").replaceChildren();
  showPanels([]);
  at("share").hidden = true;
  say("");
}

function showPanels(shown) {
  for (const panel of panels) panel.close();
  panels = shown;
  at("panels").replaceChildren(...panels.map((panel) => panel.node));
  at("nothing").hidden = panels.length > 0;
  at("legend").hidden = !panels.length;
}

// What the form asks, or null with a sentence about what is wrong with it.
function question() {
  const prompt = at("prompt").value.trim();
  const used = choices.slice(0, at("compare").checked ? 2 : 1);
  const controls = [at("seed"), at("max_tokens"), ...used.flatMap((choice) => [...choice.controls.values()])];
  const mistake = mistakeIn(controls);
  if (mistake || !prompt) {
    say(mistake?.sentence ?? "Message: it is empty; write one.");
    const control = mistake?.control ?? at("prompt");
    const details = control.closest("details");
    if (details) details.open = true;
    control.focus();
    return null;
  }
  return {
    model: model.model,
    turns: [...turns],
    prompt,
    seed: at("seed").valueAsNumber,
    maxTokens: at("max_tokens").valueAsNumber,
    choices: used.map((choice) => choice.values()),
  };
}

function bodyOf(asked, values) {
  const { temperature, ...ofCanvas } = values;
  return {
    model: asked.model,
    messages: [...asked.turns, { role: "user", content: asked.prompt }],
    seed: asked.seed,
    max_tokens: asked.maxTokens,
    ...(temperature === undefined ? {} : { temperature }),
    stream: true,
    stream_options: { include_usage: true },
    vllm_xargs: {
      diffusion_frames: 1,
      diffusion_frame_fields: ["tokens", "kept", "entropy"],
      diffusion_step_map: 1,
      ...ofCanvas,
    },
  };
}

async function answer(asked, values, panel, said, signal) {
  let text = "";
  try {
    for await (const chunk of chunksOf(bodyOf(asked, values), key, signal)) {
      const committed = panel.take(chunk);
      if (committed) {
        text += committed;
        // A screen reader says what is added to a log.
        said.append(committed);
        said.scrollIntoView({ block: "nearest" });
      }
    }
  } catch (error) {
    const isStopped = error.name === "AbortError";
    panel.end(isStopped ? "Stopped." : "Ended before the answer was whole.");
    if (!isStopped) throw error;
    return null;
  }
  panel.end("Done.");
  return text;
}

async function ask() {
  const asked = question();
  if (!asked) return;
  say("");
  stopping = new AbortController();
  at("send").disabled = at("clear").disabled = true;
  at("stop").disabled = false;
  const compares = asked.choices.length > 1;
  const names = compares ? ["A", "B"] : ["Model"];
  showPanels(asked.choices.map((values, index) =>
    new Panel(compares ? `${names[index]}: ${inWords(values)}` : `Settings: ${inWords(values)}`)));
  addToLog("You", asked.prompt);
  const said = names.map((name) => addToLog(name, ""));
  at("prompt").value = "";
  at("link").value = `${location.origin}${location.pathname}${fragmentOf(asked)}`;
  at("share").hidden = false;
  at("copied").textContent = "";
  const ended = await Promise.allSettled(asked.choices.map((values, index) =>
    answer(asked, values, panels[index], said[index], stopping.signal)));
  stopping = null;
  at("send").disabled = false;
  at("clear").disabled = false;
  at("stop").disabled = true;
  const failed = ended.find((end) => end.status === "rejected");
  if (!failed && ended[0].value !== null) {
    // A chat goes on from the answer with the first settings.
    turns = [...asked.turns, { role: "user", content: asked.prompt }, { role: "assistant", content: ended[0].value }];
    at("prompt").focus();
    return;
  }
  at("prompt").value = asked.prompt;
  if (failed) report(failed.reason);
}

function report(error) {
  if (!(error instanceof Problem)) {
    say(`Page: it failed at this: ${error.message}`);
    throw error;
  }
  say(error.message);
  at(error instanceof WrongKey ? "key" : "prompt").focus();
}

at("connect").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  at("key").value = "";
  connect().catch(report);
});
at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!at("send").disabled) ask().catch(report);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => stopping?.abort());
at("clear").addEventListener("click", clearChat);
at("compare").addEventListener("change", showChoices);
at("share").addEventListener("submit", async (event) => {
  event.preventDefault();
  at("link").select();
  try {
    await navigator.clipboard.writeText(at("link").value);
    at("copied").textContent = "Copied.";
  } catch {
    // Browsers give the clipboard to pages from this machine or over https only.
    at("copied").textContent = "Selected; copy it with Ctrl and C.";
  }
});
addEventListener("hashchange", readLink);

fillScale(at("scale"));
// A server without a key needs none.
connect().catch((error) => {
  if (error instanceof WrongKey) at("key").focus();
  else report(error);
});
