// The rater's page. It knows opaque names only: which method is on which side is the server's secret.
"use strict";

const token = location.hash.slice(1);
const $ = (id) => document.getElementById(id);
const SIDES = ["left", "tie", "right"];
const SHOWN = { left: "A", tie: "Tie", right: "B" };
const MEANS = { left: "A is better", tie: "no difference", right: "B is better" };
const ACTION = { 1: "left", 2: "tie", 3: "right", ArrowLeft: "left", ArrowDown: "tie", ArrowRight: "right" };
const clips = new Map(); // name of a clip -> its <video>, loaded ahead of time
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;

let state = null; // what the server said last
let answers = {};
let active = 0; // the question that the keyboard answers
let nonce = "";
let sending = false;
let playing = true;
let speed = 1;
let hearing = 0;

const sleep = (ms) => new Promise((wake) => setTimeout(wake, ms));

/** Asks until there is an answer: a server that restarts or a broken line costs time, not votes. */
async function ask(path, options = {}) {
  for (let attempt = 0; ; attempt++) {
    let response = null;
    try {
      response = await fetch(path, {
        ...options,
        headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" },
        cache: "no-store",
        credentials: "omit",
      });
      if (response.status < 500 && response.status !== 429 && response.status !== 408) {
        notice("");
        return { status: response.status, body: await response.json() };
      }
    } catch {
      response = null; // no line, or cut off in the middle: ask again
    }
    if (attempt > 0) notice("No answer from the server. Trying again; nothing you chose is lost.");
    await sleep(Math.min(4000, 200 * 2 ** attempt));
  }
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function message(title, paragraphs, start = false) {
  $("compare").hidden = true;
  $("message").hidden = false;
  $("message-title").textContent = title;
  $("message-text").replaceChildren(...paragraphs.map((text) => make("p", { textContent: text })));
  $("start").hidden = !start;
  if (start) $("start").focus();
}

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

/** A <video> for a clip, made once; both the tasks on the page and the one after it are loaded. */
function clip(name) {
  let video = clips.get(name);
  if (!video) {
    video = make("video", { muted: true, playsInline: true, preload: "auto", disablePictureInPicture: true });
    video.addEventListener("loadeddata", () => {
      video.loaded = true; // readyState falls back while it seeks
      ready();
    });
    video.addEventListener("error", () => failed(video, name));
    video.addEventListener("click", toggle);
    video.src = `clip/${name}`;
    clips.set(name, video);
  }
  return video;
}

/** A video that does not load is tried again for as long as it is needed; answers wait for it. */
function failed(video, name) {
  const tries = (video.tries ?? 0) + 1;
  video.tries = tries;
  if (tries > 2) notice("A video does not load. Trying again.");
  setTimeout(() => {
    if (clips.get(name) === video) video.src = `clip/${name}`;
  }, Math.min(4000, 200 * 2 ** tries));
}

const shown = () => (state?.task ? [clip(state.task.left), clip(state.task.right)] : []);
const loaded = () => shown().every((video) => video.loaded);

function ready() {
  const [left] = shown();
  if (loaded()) notice("");
  if (left?.videoWidth) {
    document.documentElement.style.setProperty("--ratio", `${left.videoWidth} / ${left.videoHeight}`);
  }
  if (loaded()) play(playing);
  offer();
}

/** Which of the two is heard: none, A or B; both at once would be noise. */
function hear(which) {
  hearing = which;
  shown().forEach((video, place) => { video.muted = place !== which - 1; });
  const name = ["off", "A", "B"][which];
  $("sound").textContent = `♪ ${name}`;
  $("sound").setAttribute("aria-label", `Sound: ${name}`);
}

function play(on) {
  playing = on;
  for (const video of shown()) {
    video.playbackRate = speed;
    if (on && !video.ended) video.play().catch(() => {}); // a browser that refuses leaves it to the button
    if (!on) video.pause();
  }
  $("play").classList.toggle("on", on);
  $("play").setAttribute("aria-label", on ? "Pause both videos" : "Play both videos");
}

function toggle() {
  play(!playing);
}

/** Both videos follow the longer one, and begin again together. */
function follow() {
  const videos = shown();
  if (videos.length && loaded()) {
    const [lead, other] = [...videos].sort((a, b) => b.duration - a.duration);
    if (playing && lead.ended) {
      for (const video of videos) video.currentTime = 0;
      play(true);
    } else {
      const wanted = Math.min(lead.currentTime, other.duration);
      if (!other.seeking && Math.abs(other.currentTime - wanted) > 0.1) other.currentTime = wanted;
    }
    if (document.activeElement !== $("seek") || playing) $("seek").value = (1000 * lead.currentTime) / (lead.duration || 1);
  }
  requestAnimationFrame(follow);
}

function seek() {
  play(false);
  const longest = Math.max(...shown().map((video) => video.duration || 0));
  for (const video of shown()) video.currentTime = Math.min(($("seek").value / 1000) * longest, video.duration || 0);
}

function questions() {
  $("questions").replaceChildren(
    ...state.dimensions.map(({ name, question }, place) => {
      const radios = SIDES.map((side, number) => {
        const input = make("input", { type: "radio", name: `q${place}`, value: side, id: `q${place}-${side}` });
        input.setAttribute("aria-label", `${name}: ${MEANS[side]}`);
        input.addEventListener("change", () => answer(place, side));
        return make("div", { className: "choice" }, input,
          make("label", { htmlFor: input.id }, make("span", { textContent: SHOWN[side] }), make("kbd", { textContent: number + 1 })));
      });
      const field = make("fieldset", { id: `q${place}` },
        make("legend", { textContent: name }),
        make("p", { textContent: question, dir: "auto", id: `q${place}-text` }),
        make("div", { className: "choices" }, ...radios));
      field.setAttribute("aria-describedby", `q${place}-text`);
      field.addEventListener("focusin", () => turn(place));
      return field;
    }),
  );
}

function turn(place) {
  active = place;
  [...$("questions").children].forEach((field, number) => field.classList.toggle("active", number === place));
}

function answer(place, side) {
  answers[state.dimensions[place].name] = side;
  $(`q${place}-${side}`).checked = true;
  const open = state.dimensions.findIndex(({ name }) => !(name in answers));
  turn(open < 0 ? place : open);
  $(`q${active}`).scrollIntoView({ block: "nearest" });
  offer();
}

const unanswered = () => state.dimensions.map(({ name }) => name).filter((name) => !(name in answers));
const complete = () => !unanswered().length;

/** Says why Next does nothing yet. */
function hint() {
  const names = unanswered();
  const what = names.length === state.dimensions.length ? "Nothing is answered yet" : `Not answered yet: ${names.join(", ")}`;
  $("hint").textContent = names.length ? `${what}. Choose A, Tie or B for each question.` : loaded() ? "" : "The videos are still loading.";
}

function offer() {
  if (!state?.task) return;
  $("submit").setAttribute("aria-disabled", String(!complete() || !loaded() || sending));
  if ($("hint").textContent) hint(); // what it says may have been done
}

function show(next) {
  state = next;
  document.title = $("title").textContent = state.title;
  $("progress").hidden = false;
  $("bar").max = state.total || 1;
  $("bar").value = state.done;
  $("count").textContent = `${state.done} of ${state.total}`;
  const wanted = state.task ? [state.task.left, state.task.right, ...state.next] : [];
  for (const [name, video] of clips) {
    if (wanted.includes(name)) continue;
    clips.delete(name);
    video.pause();
    video.removeAttribute("src");
    video.load(); // frees the decoder
  }
  if (!state.task) {
    return message("Thank you!", [`All ${state.total} comparisons are stored. You can close this page.`]);
  }
  $("message").hidden = true;
  $("compare").hidden = false;
  $("prompt").textContent = state.task.prompt;
  $("announce").textContent = `Comparison ${state.done + 1} of ${state.total}`;
  for (const [side, letter] of [["left", "A"], ["right", "B"]]) {
    clip(state.task[side]).setAttribute("aria-label", `Video ${letter}`);
    $(side).replaceChildren(clip(state.task[side]));
  }
  $("hint").textContent = "";
  $("sound").hidden = !state.sound;
  hear(0);
  for (const name of state.next) clip(name);
  answers = {};
  nonce = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  questions();
  turn(0);
  playing = !still;
  for (const video of shown()) if (video.loaded) video.currentTime = 0;
  ready();
  scrollTo(0, 0);
}

async function send() {
  if (sending) return;
  if (!complete() || !loaded()) return void hint();
  sending = true;
  offer();
  const vote = JSON.stringify({ task: state.task.name, nonce, answers });
  const reply = await ask("api/vote", { method: "POST", body: vote });
  sending = false;
  if (reply.status === 200) show(reply.body);
  else await begin(); // voted in another window, or the link is no longer valid: the server knows
}

async function begin() {
  const reply = token ? await ask("api/task") : { status: 401 };
  if (reply.status !== 200) {
    state = null;
    message("This link is not valid", ["Please ask the person who invited you for a new one, and open it as it was sent."]);
    return;
  }
  const first = state === null && reply.body.done === 0 && reply.body.task;
  if (!first) return show(reply.body);
  document.title = $("title").textContent = reply.body.title;
  message("Welcome", [
    `You will see ${reply.body.total} pairs of videos, each made from a text. Watch both, then say for each question whether A or B is better. If you see no difference, choose Tie.`,
    "Every answer is stored at once. You can stop at any time and continue later with the same link.",
  ], true);
  $("start").onclick = () => show(reply.body);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("compare").hidden) return;
  const target = event.target;
  if (target === $("seek") && event.key.startsWith("Arrow")) return;
  if (event.key in ACTION) answer(active, ACTION[event.key]);
  else if (event.key === "ArrowUp" || event.key === "Backspace") turn(Math.max(0, active - 1));
  else if (event.key === "Enter" && target.tagName !== "BUTTON") send();
  else if (event.key === " " && !["BUTTON", "INPUT"].includes(target.tagName)) toggle();
  else return;
  event.preventDefault();
});
$("compare").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("play").addEventListener("click", toggle);
$("seek").addEventListener("input", seek);
$("speed").addEventListener("click", () => {
  speed = speed === 1 ? 0.5 : speed === 0.5 ? 0.25 : 1;
  $("speed").textContent = { 1: "1×", 0.5: "½×", 0.25: "¼×" }[speed];
  $("speed").setAttribute("aria-label", `Playback speed: ${speed}`);
  for (const video of shown()) video.playbackRate = speed;
});
$("sound").addEventListener("click", () => hear((hearing + 1) % 3));
addEventListener("hashchange", () => location.reload());

requestAnimationFrame(follow);
begin();
