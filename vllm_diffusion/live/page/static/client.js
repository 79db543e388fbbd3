// Requests to the server that this page came from, and its errors in one sentence each.

const MOST_OF_A_MESSAGE = 400;

export class Problem extends Error {}

// Is refused so; the page asks for another key.
export class WrongKey extends Problem {}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function fetched(path, options) {
  try {
    return await fetch(path, { credentials: "omit", cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("Network: the server cannot be reached; see whether it still runs, and try again.");
  }
}

// The message of a response that is no success, as an error.
async function refusal(response, key) {
  if (response.status === 401) {
    return new WrongKey(
      key ? "Key: the server refused this key; enter another one."
          : "Key: the server asks for a key; enter it and press Connect.");
  }
  const body = await response.text().catch(() => "");
  const reason = message(body);
  if (response.status === 404) {
    return new Problem(`Model: ${reason || "the server does not serve this model."}`);
  }
  const subject = response.status < 500 ? "refused the request" : "failed";
  return new Problem(`Server: it ${subject} with status ${response.status}${reason ? `: ${reason}` : "."}`);
}

function message(body) {
  let text = body;
  try {
    const { error, detail } = JSON.parse(body);
    text = error?.message ?? detail ?? error ?? "";
  } catch {
    // Not every server between this page and vLLM writes JSON.
  }
  text = typeof text === "string" ? text : JSON.stringify(text);
  return text.length > MOST_OF_A_MESSAGE ? `${text.slice(0, MOST_OF_A_MESSAGE)}…` : text;
}

// The served model: see vllm_diffusion/live/page/plugin.py.
export async function describedModel(key) {
  const response = await fetched("../v1/diffusion/model", { headers: headers(key) });
  if (!response.ok) throw await refusal(response, key);
  return parsed(await response.text());
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Problem("Server: what it sent is not what vLLM sends; see whether something stands between.");
  }
}

// The chunks of a streamed answer, one after another.
export async function* chunksOf(body, key, signal) {
  const response = await fetched("../v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response, key);
  const brokenOff = new Problem(
    "Server: it broke off in the middle of the answer; what came is shown, and the message can be sent again.");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : brokenOff;
    }
    if (part.done) throw brokenOff;
    const events = (waiting + part.value).split(/\r?\n\r?\n/);
    waiting = events.pop();
    for (const event of events) {
      const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (!lines.length) continue;
      const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      const chunk = parsed(data);
      if (chunk.error) throw new Problem(`Server: it gave the answer up: ${message(data)}`);
      yield chunk;
    }
  }
}
