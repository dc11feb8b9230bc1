// What every JavaScript client's program does, as scenes.py.
export const WEATHER = "WEATHER in Paris, please";
export const STORY = "STORY, please";
export const LONG = "much ".repeat(20_000);
export const CHUNKS = 3;

export async function play(scenes) {
  for (const [name, scene] of Object.entries(scenes)) {
    console.log(JSON.stringify({ [name]: await scene() }));
  }
  for await (const _ of process.stdin);
}

export function told(error) {
  return {
    kinds: [error.name, error.constructor.name],
    status: error.statusCode ?? error.status_code ?? null,
    code: error.data?.error?.code ?? null,
    message: error.message,
  };
}
