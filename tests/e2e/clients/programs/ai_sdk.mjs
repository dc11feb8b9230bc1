// Vercel's AI SDK: a tool loop, a prompt that is too long, and a stream that is stopped.
import { generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";
import { model } from "./connect.mjs";
import { CHUNKS, LONG, STORY, WEATHER, play, told } from "./scenes.mjs";

const called = [];
const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async (input) => {
      called.push(input);
      return "sunny";
    },
  }),
};

async function useATool() {
  const answer = await generateText({ model, prompt: WEATHER, tools, stopWhen: isStepCount(3) });
  return { answer: answer.text, called };
}

async function fillTheContext() {
  try {
    await generateText({ model, prompt: LONG });
  } catch (error) {
    return { ...told(error), retryable: error.isRetryable };
  }
}

async function hangUp() {
  const abort = new AbortController();
  const { textStream } = streamText({ model, prompt: STORY, abortSignal: abort.signal });
  const texts = [];
  for await (const text of textStream) {
    texts.push(text);
    if (texts.length === CHUNKS) break;
  }
  abort.abort();
  return { read: texts.join("") };
}

await play({ tool: useATool, full: fillTheContext, abort: hangUp });
