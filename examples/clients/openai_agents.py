# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0"]
# ///
"""A loop of the OpenAI Agents SDK over ``/v1/responses``: question, call of a tool, its result,
answer.
"""

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    print(f"get_weather: {city}")
    return "21 degrees, sunny"


# Traces would go to OpenAI.
set_tracing_disabled(True)
settings = ModelSettings(temperature=0, extra_body={"seed": 0})
agent = Agent("weather", model="tiny", tools=[get_weather], model_settings=settings)
print(Runner.run_sync(agent, "What is the weather in Paris?").final_output)
