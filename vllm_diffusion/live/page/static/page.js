// The page of the live canvas: what its controls do.

import { Problem, WrongKey, chunksOf, describedModel } from "./client.js";
import { rendered } from "./markdown.js";
import { Panel, fillScale } from "./panel.js";
import { Settings, element, fragmentOf, inWords, mistakeIn, questionIn } from "./settings.js";

const at = (id) => document.getElementById(id);
const settings = new Settings(at("choices"), at("compare"));
// Nowhere else: it is in no storage, no address and no file.
let key = "";
let model = null;
// Messages of the chat that were answered.
let turns = [];
let panels = [];
let stopping = null;
const FRAMES = {
  diffusion_frames: 1, diffusion_frame_fields: ["tokens", "kept", "entropy"], diffusion_step_map: 1,
};
const HINT = at("prompt-hint").textContent;

function say(sentence) {
  at("problem").textContent = sentence;
}

// The form is there while the server asks for a key, and when the user wants to enter another one.
function showKeyForm(isShown) {
  const hadFocus = at("connect").contains(document.activeElement);
  at("connect").hidden = !isShown;
  at("change-key").ariaExpanded = isShown;
  if (isShown) at("key").focus();
  else if (hadFocus) at("prompt").focus({ preventScroll: true });
}

// Send is off until the server has taken a key, and the reason stands next to it.
function showHint(needsKey) {
  at("prompt-hint").textContent = needsKey
    ? "Enter the key first, at the top: the VLLM_API_KEY that the server was started with." : HINT;
  at("invitation").textContent =
    `${needsKey ? "Enter the key, then send" : "Send"} a message, and watch its answer being denoised.`;
  at("prompt-hint").classList.toggle("needed", needsKey);
}

function askForKey() {
  at("change-key").hidden = at("send").disabled = true;
  showHint(true);
  showKeyForm(true);
}

async function connect() {
  at("send").disabled = true;
  at("change-key").hidden = true;
  at("model").textContent = "Not connected.";
  const described = await describedModel(key);
  const isAnother = JSON.stringify(described) !== JSON.stringify(model);
  model = described;
  at("model").textContent =
    `${model.model} (${model.architecture}), canvases of ${model.canvas_length} tokens`;
  at("tasks").textContent = model.tasks;
  at("tasks").hidden = !model.tasks;
  at("attach").hidden = !model.takes_pictures;
  at("ends").hidden = !model.end_tokens.length;
  at("ends").textContent = `${model.end_tokens.join(" or ")} ends the answer`;
  showHint(false);
  at("send").disabled = Boolean(stopping);
  at("change-key").hidden = !key;
  showKeyForm(false);
  say("");
  // A key that is entered anew leaves the chat and the settings as they are.
  if (!isAnother) return;
  at("max_tokens").max = model.max_model_len;
  at("max_tokens").value = Math.min(256, Math.floor(model.max_model_len / 2));
  settings.describe(model);
  readLink();
}

// Fill the page with what its address holds. Nothing is sent before the user sends it.
function readLink() {
  const question = questionIn(location.hash);
  if (!question || !model || stopping) return;
  clearChat();
  turns = question.turns;
  for (const { role, content } of turns) {
    const said = addToLog(role === "user" ? "You" : "Model", content);
    if (role === "assistant") render(said, content);
  }
  at("prompt").value = question.prompt;
  at("system").value = question.system;
  at("seed").value = question.seed;
  at("max_tokens").value = question.maxTokens;
  const unknown = settings.fill(question.choices);
  const problems = [];
  if (question.model !== model.model) {
    problems.push(`Model: the link was made with ${question.model}, and this server has ${model.model}.`);
  }
  if (unknown.length) problems.push(`Settings: this model does not take ${unknown.join(", ")} of the link.`);
  say(problems.join(" "));
  at("prompt").focus({ preventScroll: true });
}

function addToLog(who, ...content) {
  const said = element("div", { className: "said" }, ...content);
  at("log").append(element("div", { className: who === "You" ? "entry you" : "entry" }, element("b", {}, who), said));
  scrollLog();
  return said;
}

// What stays in the chat of an answer that is whole.
function render(said, text) {
  said.classList.add("rendered");
  said.replaceChildren(...rendered(text));
  scrollLog();
}

// The page itself stays where it is.
function scrollLog() {
  at("log").scrollTop = at("log").scrollHeight;
}

function clearChat() {
  turns = [];
  at("log").replaceChildren();
  showPanels([]);
  at("picture").value = "";
  at("share").hidden = true;
  say("");
}

// The canvases of an answer, the last or an earlier one, and the link to its question.
function showAnswer(question, shown) {
  showPanels(shown);
  at("link").value = `${location.origin}${location.pathname}${fragmentOf(question)}`;
  at("share").hidden = false;
  at("copied").textContent = "";
  bringIntoView(at("canvases"));
}

function showPanels(shown) {
  for (const panel of panels) panel.close();
  panels = shown;
  at("panels").replaceChildren(...panels.map((panel) => panel.node));
  at("nothing").hidden = panels.length > 0;
  at("legend").hidden = !panels.length;
}

// A canvas is watched from its first step on, wherever the page was scrolled to.
function bringIntoView(section) {
  const { top } = section.getBoundingClientRect();
  if (top < 0 || top > innerHeight / 8) section.scrollIntoView({ block: "start" });
}

// The chosen file as an address that holds it; empty if none is chosen.
function readPicture() {
  const [file] = at("picture").files;
  if (!file || !model.takes_pictures) return "";
  const reader = new FileReader();
  return new Promise((resolve, reject) => {
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Problem(`Picture: ${file.name} cannot be read; choose another file.`));
    reader.readAsDataURL(file);
  });
}

// What the form asks, or null with a sentence about what is wrong with it.
function readQuestion() {
  const prompt = at("prompt").value.trim();
  const mistake = mistakeIn([at("seed"), at("max_tokens"), ...settings.controls()]);
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
    system: at("system").value.trim(),
    turns: [...turns],
    prompt,
    seed: at("seed").valueAsNumber,
    maxTokens: at("max_tokens").valueAsNumber,
    choices: settings.choices(),
  };
}

function messageOf({ prompt, picture }) {
  const text = { type: "text", text: prompt };
  return { role: "user", content: picture ? [{ type: "image_url", image_url: { url: picture } }, text] : prompt };
}

// A request that denoises nothing has no frames.
function isDenoised(values) {
  const ways = model.settings.find(({ name }) => name === "diffusion_rule");
  return (values.diffusion_rule ?? ways?.default) !== "autoregressive";
}

function bodyOf(question, values) {
  const { temperature, ...ofCanvas } = values;
  return {
    model: question.model,
    messages: [
      ...(question.system ? [{ role: "system", content: question.system }] : []), ...question.turns, messageOf(question),
    ],
    seed: question.seed,
    max_tokens: question.maxTokens,
    ...(temperature === undefined ? {} : { temperature }),
    stream: true,
    stream_options: { include_usage: true },
    vllm_xargs: { ...(isDenoised(values) ? FRAMES : {}), ...ofCanvas },
  };
}

// Of an answer without text, in the place where that would be.
function explain(said, why) {
  said.textContent = `No text: ${why}.`;
  said.classList.add("why");
}

async function answer(question, values, panel, said, signal) {
  let text = "";
  try {
    for await (const chunk of chunksOf(bodyOf(question, values), key, signal)) {
      const emitted = panel.take(chunk);
      if (emitted) {
        text += emitted;
        // A screen reader reads out what is added to a log.
        said.append(emitted);
        scrollLog();
      }
    }
  } catch (error) {
    const isStopped = error.name === "AbortError";
    panel.end(isStopped ? "Stopped" : "Ended before the answer was whole");
    if (!text) explain(said, isStopped ? "you stopped it" : "it ended before it was whole");
    if (!isStopped) throw error;
    return null;
  }
  panel.end("Done");
  if (text.trim()) render(said, text);
  else explain(said, panel.whyEmpty());
  return text;
}

// A request may have narrower canvases than the server's.
function canvasLength(values) {
  if (!isDenoised(values)) return 0;
  return values.diffusion_canvas_length ?? values.diffusion_block_length ?? model.canvas_length;
}

function titleOf(choices, index) {
  if (choices.length > 1) return [`${"AB"[index]}: `, ...inWords(choices[index], choices[1 - index])];
  return Object.keys(choices[0]).length ? ["Answer: ", ...inWords(choices[0])] : ["Answer"];
}

// Stop stands in the place of Send, with the keyboard on whichever is there; `controller` is null after an answer.
function showAnswering(controller) {
  const hadFocus = [at("send"), at("stop")].includes(document.activeElement);
  stopping = controller;
  at("send").disabled = at("send").hidden = at("clear").disabled = Boolean(stopping);
  at("stop").disabled = at("stop").hidden = !stopping;
  if (hadFocus) at(stopping ? "stop" : "prompt").focus({ preventScroll: true });
}

async function ask() {
  const question = readQuestion();
  if (!question) return;
  say("");
  showAnswering(new AbortController());
  try {
    question.picture = await readPicture();
  } catch (error) {
    showAnswering(null);
    throw error;
  }
  const names = question.choices.length > 1 ? ["A", "B"] : ["Model"];
  const shown = question.choices.map((values, index) =>
    new Panel(titleOf(question.choices, index), model.end_tokens, canvasLength(values)));
  const picture = question.picture ? [element("img", { src: question.picture, alt: "The picture" })] : [];
  addToLog("You", ...picture, question.prompt);
  const answers = names.map((name) => addToLog(name));
  for (const said of answers) {
    const button = element("button", { type: "button", className: "quiet" }, "Canvas");
    button.addEventListener("click", () => showAnswer(question, shown));
    said.after(button);
  }
  at("prompt").value = "";
  showAnswer(question, shown);
  const ended = await Promise.allSettled(question.choices.map((values, index) =>
    answer(question, values, shown[index], answers[index], stopping.signal)));
  showAnswering(null);
  const failed = ended.find((end) => end.status === "rejected");
  if (!failed && ended[0].value !== null) {
    // A chat goes on from the answer with the first settings.
    turns = [...question.turns, messageOf(question), { role: "assistant", content: ended[0].value }];
    at("picture").value = "";
    return;
  }
  at("prompt").value = question.prompt;
  if (failed) report(failed.reason);
}

function report(error) {
  if (!(error instanceof Problem)) {
    say(`Page: it failed at this: ${error.message}`);
    throw error;
  }
  say(error.message);
  if (!(error instanceof WrongKey)) {
    at("prompt").focus({ preventScroll: true });
    return;
  }
  askForKey();
}

at("change-key").addEventListener("click", () => showKeyForm(at("connect").hidden));
at("connect").addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !at("change-key").hidden) showKeyForm(false);
});
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
  if (error instanceof WrongKey) askForKey();
  else report(error);
});
