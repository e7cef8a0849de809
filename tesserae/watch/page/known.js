// What is known.
const known = {
  run: null, now: null, nowTag: "", timeline: null, timelineStep: -1, dial: null, dialAnswer: "",
  curve: { step: [], loss: [], speed: [], seconds: [], valStep: [], val: [], degrees: null, next: 0 },
  measured: new Map(),  // by degrees: [tokens/s, bytes of the fullest rank] of its last steps
  events: [], eventsNext: 0, marks: {}, loading: null, heard: 0,
};
