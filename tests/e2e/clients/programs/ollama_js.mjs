// Ollama's client for JavaScript: tools, a prompt that is too long, and a stream that is stopped.
import { ollama } from "./connect.mjs";
import { CHUNKS, LONG, STORY, WEATHER, play, told } from "./scenes.mjs";

const { models } = await ollama.list();
const model = models[0].name;
const called = [];
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } } },
    },
  },
];

async function useATool() {
  const messages = [{ role: "user", content: WEATHER }];
  const first = await ollama.chat({ model, messages, tools });
  messages.push(first.message);
  for (const call of first.message.tool_calls) {
    called.push(call.function.arguments);
    messages.push({ role: "tool", tool_name: call.function.name, content: "sunny" });
  }
  const answer = await ollama.chat({ model, messages, tools });
  return { answer: answer.message.content, called };
}

async function fillTheContext() {
  try {
    await ollama.generate({ model, prompt: LONG });
  } catch (error) {
    return told(error);
  }
}

async function hangUp() {
  const messages = [{ role: "user", content: STORY }];
  const stream = await ollama.chat({ model, messages, stream: true });
  const texts = [];
  try {
    for await (const part of stream) {
      texts.push(part.message.content);
      if (texts.length === CHUNKS) stream.abort();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
  return { read: texts.join("") };
}

await play({ tool: useATool, full: fillTheContext, abort: hangUp });
