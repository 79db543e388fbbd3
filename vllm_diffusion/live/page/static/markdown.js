// Markdown of an answer, as nodes of the page.

import { lexer } from "./marked.js";
import { element } from "./settings.js";

const TAGS = {
  paragraph: "p", blockquote: "blockquote", list_item: "li", strong: "strong", em: "em", del: "del", br: "br", hr: "hr",
};

// Only elements that are named here are made, without attributes, and all else is text.
function nodeOf(token) {
  const { type, raw, text, tokens } = token;
  const within = () => nodesOf(tokens ?? []);
  if (type in TAGS) return element(TAGS[type], {}, ...within());
  switch (type) {
    case "heading": return element(`h${Math.min(token.depth + 2, 6)}`, {}, ...within());
    case "list": return element(token.ordered ? "ol" : "ul", token.ordered ? { start: token.start } : {}, ...nodesOf(token.items));
    case "codespan": return element("code", {}, text);
    case "code": return element("pre", {}, element("code", {}, text));
    case "table": return element("table", {}, ...[token.header, ...token.rows].map((cells, index) =>
      element("tr", {}, ...cells.map((cell) => element(index ? "td" : "th", {}, ...nodesOf(cell.tokens))))));
    case "escape": return text;
    case "text": return tokens ? element("span", {}, ...within()) : text;
    case "space": return "";
    // Links, pictures and HTML stay as they were written: nobody is led elsewhere.
    default: return raw;
  }
}

function nodesOf(tokens) {
  return tokens.map(nodeOf);
}

// A line of an answer ends where its writer ended it.
export function rendered(text) {
  try {
    return nodesOf(lexer(text, { gfm: true, breaks: true }));
  } catch (error) {
    // Thousands of quotations or lists, each within the one before.
    if (error instanceof RangeError) return [text];
    throw error;
  }
}
