# /// script
# requires-python = ">=3.11"
# dependencies = ["guidance==0.3.1", "openai==3.57.0"]
# ///
"""Captures of guidance: a choice, an expression and JSON of a schema."""

import os

from guidance import assistant, gen, json, select, user
from guidance.models.experimental import VLLMModel

model = VLLMModel("tiny", base_url=os.environ["OPENAI_BASE_URL"], echo=False)
# It takes text from log-probabilities where a chunk has several, and so the end token for text: a
# canvas comes as one chunk. It has no public switch for that.
model._interpreter.logprobs = False
schema = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
for answer in (select(["9", "15"], "sum"), gen("sum", regex="[0-9]+"), json("sum", schema=schema)):
    with user():
        asked = model + "What is 7+8?"
    with assistant():
        asked += answer
    print(asked["sum"])
