/** A file that breaks a rule of spec/v1. The rule is the number on the page. */
export class Refused extends Error {
  constructor(rule, message, at = "") {
    super(`${rule}: ${at ? `${at}: ` : ""}${message}`);
    this.rule = rule;
  }
}

/** Refuse unless `good`. */
export function need(good, rule, message, at = "") {
  if (!good) throw new Refused(rule, typeof message === "function" ? message() : message, at);
}
