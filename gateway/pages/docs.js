"use strict";

// The API page: shows /openapi.json (OpenAPI 3.1). It knows no route in particular.

const VERBS = ["get", "post", "put", "patch", "delete", "head", "options", "trace"];
const MAX_DEPTH = 4; // of nested fields; it also ends a schema that contains itself

let spec = {};

/** The object itself, or what its $ref points to in this document, with what stands beside the $ref. */
function resolve(object) {
  const seen = new Set();
  let found = object ?? {};
  while (typeof found.$ref === "string" && !seen.has(found.$ref)) {
    seen.add(found.$ref);
    const { $ref, ...beside } = found;
    const steps = $ref
      .split("/")
      .slice(1)
      .map((step) => decodeURIComponent(step).replaceAll("~1", "/").replaceAll("~0", "~"));
    const target = steps.reduce((place, step) => place?.[step], spec);
    found = { ...(target ?? {}), ...beside };
  }
  if (found.allOf) {
    const { allOf, ...beside } = found;
    const parts = [...allOf.map(resolve), beside];
    found = Object.assign({}, ...parts);
    found.properties = Object.assign({}, ...parts.map((part) => part.properties ?? {}));
    found.required = parts.flatMap((part) => part.required ?? []);
  }
  return found;
}

const branchesOf = (schema) => schema.anyOf ?? schema.oneOf ?? null;

const shown = (number) => (typeof number === "number" ? number.toLocaleString("en") : String(number));

function between(least, most, thing = "") {
  if (least === undefined && most === undefined) return null;
  const unit = thing && ` ${thing}${(most ?? least) === 1 ? "" : "s"}`;
  if (least === undefined) return `at most ${shown(most)}${unit}`;
  if (most === undefined) return `at least ${shown(least)}${unit}`;
  return least === most ? `exactly ${shown(least)}${unit}` : `${shown(least)} to ${shown(most)}${unit}`;
}

/** What a schema says of numbers and texts beyond their type. */
function boundsOf(schema) {
  return [
    between(schema.minimum, schema.maximum),
    schema.exclusiveMinimum === undefined ? null : `above ${shown(schema.exclusiveMinimum)}`,
    schema.exclusiveMaximum === undefined ? null : `below ${shown(schema.exclusiveMaximum)}`,
    between(schema.minLength, schema.maxLength, "character"),
    schema.multipleOf === undefined ? null : `a multiple of ${shown(schema.multipleOf)}`,
    schema.pattern === undefined ? null : `matching ${schema.pattern}`,
    schema.format ?? null,
  ].filter(Boolean);
}

/** A schema's type and bounds in words. */
function inWords(given, depth = 0) {
  const schema = resolve(given);
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  const branches = branchesOf(schema);
  if (branches) return [...new Set(branches.map((branch) => inWords(branch, depth)))].join(" or ");
  const types = [schema.type ?? (schema.properties ? "object" : schema.items ? "array" : "anything")].flat();
  const bounds = boundsOf(schema);
  const words = types.map((type) => {
    if (type === "array") {
      const size = between(schema.minItems, schema.maxItems);
      const members = schema.items && depth < MAX_DEPTH ? ` of ${inWords(schema.items, depth + 1)}` : "";
      return `list${size ? ` (${size})` : ""}${members}`;
    }
    return type === "null" || !bounds.length ? type : `${type} (${bounds.join(", ")})`;
  });
  return words.join(" or ");
}

/** The object schemas of a schema's values, through lists and alternatives: [what precedes a field, schema]. */
function objectsIn(given, prefix = "", depth = 0) {
  const schema = resolve(given);
  if (depth > MAX_DEPTH) return [];
  if (schema.properties) return [[prefix, schema]];
  if (schema.items) return objectsIn(schema.items, `${prefix}[]`, depth + 1);
  return (branchesOf(schema) ?? []).flatMap((branch) => objectsIn(branch, prefix, depth + 1));
}

/** A text's nodes: what stands between backticks is code. */
const inline = (text) => text.split("`").map((part, index) => (index % 2 ? make("code", {}, part) : part));

/** The paragraphs of a text. */
function prose(text) {
  return (text ?? "")
    .trim()
    .split(/\n\s*\n/)
    .filter(Boolean)
    .map((paragraph) => make("p", {}, ...inline(paragraph)));
}

/** One row for each field, those of inner objects after their own. */
function rowsOf(given, prefix = "", depth = 0) {
  if (depth > MAX_DEPTH) return [];
  return objectsIn(given, prefix).flatMap(([place, schema]) =>
    requiredFirst(schema).flatMap(([name, property, isRequired]) => {
      const path = place ? `${place}.${name}` : name;
      return [fieldRow(path, resolve(property), isRequired), ...rowsOf(property, path, depth + 1)];
    }),
  );
}

function requiredFirst(schema) {
  const fields = Object.entries(schema.properties);
  const found = fields.map(([name, property]) => [name, property, (schema.required ?? []).includes(name)]);
  return found.sort(([, , one], [, , other]) => other - one);
}

/** A body's fields; where it may be one of several objects, each by itself. */
function bodyOf(schema) {
  const objects = objectsIn(schema);
  if (!objects.length) return [make("h4", {}, "Body"), make("p", { class: "type" }, inWords(schema))];
  return objects.flatMap(([place, object], index) => {
    const title = objects.length === 1 ? "Body" : `${index ? "Or" : "Body"}: ${object.title ?? "an object"}`;
    return [make("h4", {}, title), ...prose(object.description), fieldList(rowsOf(object, place))];
  });
}

function fieldRow(name, field, isRequired) {
  const label = make("dt", {}, name, ...(isRequired ? [make("small", {}, "required")] : []));
  const line = make("p", { class: "type" }, inWords(field));
  if (field.default != null) line.append("; default ", make("code", {}, JSON.stringify(field.default)));
  return make("div", {}, label, make("dd", {}, line, ...prose(field.description)));
}

function fieldList(rows) {
  return make("dl", { class: "fields" }, ...rows);
}

/** A value that the schema allows, of its own example where it has one. */
function sampleOf(given, depth = 0) {
  const schema = resolve(given);
  if (schema.example !== undefined) return schema.example;
  if (schema.examples?.length) return schema.examples[0];
  if ("const" in schema) return schema.const;
  if (schema.default !== undefined && schema.default !== null) return schema.default;
  if (schema.enum) return schema.enum[0];
  const branches = branchesOf(schema);
  if (branches) return sampleOf(branches[0], depth);
  const type = [schema.type].flat()[0];
  if (schema.properties || type === "object") {
    const names = depth > MAX_DEPTH ? [] : (schema.required ?? []);
    return Object.fromEntries(names.map((name) => [name, sampleOf(schema.properties?.[name], depth + 1)]));
  }
  if (type === "array")
    return depth > MAX_DEPTH ? [] : Array(Math.max(1, schema.minItems ?? 1)).fill(sampleOf(schema.items, depth + 1));
  if (type === "integer" || type === "number") return schema.minimum ?? 1;
  if (type === "boolean") return true;
  return type === "null" ? null : "a text";
}

function exampleOf(media) {
  if (media.example !== undefined) return media.example;
  const named = Object.values(media.examples ?? {})[0];
  return named === undefined ? sampleOf(media.schema) : resolve(named).value;
}

const jsonOf = (content) => content?.["application/json"] ?? Object.values(content ?? {})[0];

function parametersOf(path, operation) {
  const all = [...(spec.paths[path].parameters ?? []), ...(operation.parameters ?? [])].map(resolve);
  return all.map((parameter) => {
    const field = { ...resolve(parameter.schema), description: parameter.description };
    return fieldRow(`${parameter.name} (${parameter.in})`, field, Boolean(parameter.required));
  });
}

/** What an operation answers. Failures mostly share one body, which is then shown once. */
function answersOf(operation) {
  const answers = Object.entries(operation.responses ?? {}).map(([status, answer]) => [status, resolve(answer)]);
  const failures = answers.filter(([status, answer]) => Number(status) >= 400 && !answer.headers);
  const bodies = failures.map(([, answer]) => JSON.stringify(answer.content));
  const common = bodies.find((body, index) => bodies.indexOf(body) !== index);
  const alike = new Map(failures.filter((_, index) => bodies[index] === common && bodies.length > 1));
  const others = answers.filter(([status]) => !alike.has(status));
  const found = [];
  if (others.length) found.push(make("h4", {}, "Answers"), make("ul", { class: "answers" }, ...others.map(answerOf)));
  if (alike.size) {
    const rows = [...alike].map(([status, { description }]) =>
      make("div", {}, make("dt", {}, status), make("dd", {}, ...prose(description))),
    );
    found.push(make("h4", {}, "Errors"), make("div", { class: "errors" }, fieldList(rows)));
    const body = bodyRows([...alike.values()][0]);
    if (body.length) found.push(make("details", {}, make("summary", {}, "The body of an error"), fieldList(body)));
  }
  return found;
}

function answerOf([status, answer]) {
  const title = [make("b", {}, status), ...inline(answer.description ?? "")];
  const headers = Object.entries(answer.headers ?? {}).map(([name, header]) => {
    const { schema, description } = resolve(header);
    return fieldRow(`${name} (header)`, { ...resolve(schema), description }, false);
  });
  const rows = [...headers, ...bodyRows(answer)];
  if (!rows.length) return make("li", {}, make("p", {}, ...title));
  return make("li", {}, make("details", {}, make("summary", {}, ...title), fieldList(rows)));
}

/** What the bodies of an answer hold, one media type after the other. */
function bodyRows(answer) {
  return Object.entries(answer.content ?? {}).flatMap(([type, media]) => {
    const rows = media.schema ? rowsOf(media.schema) : [];
    const words = media.schema && !rows.length ? `${type}: ${inWords(media.schema)}` : type;
    return [make("div", {}, make("dt", {}, "body"), make("dd", {}, make("p", { class: "type" }, words))), ...rows];
  });
}

const anchorOf = (verb, path) => `${verb}${path.replaceAll(/[^\w]+/g, "-").replace(/-$/, "") || "-root"}`;

function operationOf(path, verb, operation) {
  const anchor = anchorOf(verb, path);
  const section = make("section", {
    class: "operation",
    id: anchor,
    "data-path": path,
    "data-verb": verb,
    "aria-label": `${verb.toUpperCase()} ${path}`,
  });
  const heading = make("h3", {}, make("span", { class: "verb" }, verb), make("a", { href: `#${anchor}` }, path));
  if (operation.deprecated) heading.append(make("small", { class: "muted" }, "deprecated"));
  section.append(heading);
  const about = [...prose(operation.summary), ...prose(operation.description)];
  if (about.length) section.append(make("div", { class: "prose" }, ...about));
  const parameters = parametersOf(path, operation);
  if (parameters.length) section.append(make("h4", {}, "Parameters"), fieldList(parameters));
  const media = jsonOf(resolve(operation.requestBody).content);
  if (media?.schema) section.append(...bodyOf(media.schema));
  section.append(...answersOf(operation));
  const security = operation.security ?? spec.security ?? [];
  const needsKey = security.length > 0 && !security.some((choice) => Object.keys(choice).length === 0);
  const withKey = needsKey || (security.length > 0 && Boolean(sessionStorage.getItem(KEY)));
  section.append(
    make("h4", {}, "Example"),
    shell(curlOf(verb.toUpperCase(), path, media && exampleOf(media), withKey)),
  );
  return section;
}

function showSpec() {
  const info = spec.info ?? {};
  byId("title").textContent = info.title ?? "API";
  const source = make(
    "p",
    { class: "muted small" },
    info.version ? `Version ${info.version}, made of ` : "Made of ",
    make("a", { href: "/openapi.json" }, "/openapi.json"),
  );
  byId("about").replaceChildren(...prose(info.description), source);
  const groups = new Map((spec.tags ?? []).map((tag) => [tag.name, { about: tag.description, operations: [] }]));
  for (const [path, item] of Object.entries(spec.paths ?? {})) {
    for (const verb of VERBS.filter((name) => item[name])) {
      const name = item[verb].tags?.[0] ?? "Other";
      if (!groups.has(name)) groups.set(name, { operations: [] });
      groups.get(name).operations.push([path, verb, item[verb]]);
    }
  }
  byId("groups").replaceChildren();
  byId("contents").replaceChildren(make("summary", {}, "Routes"));
  for (const [name, { about, operations }] of groups) {
    if (!operations.length) continue;
    byId("groups").append(
      make(
        "section",
        { class: "group" },
        make("h2", {}, name),
        make("div", { class: "prose muted" }, ...prose(about)),
        ...operations.map((operation) => operationOf(...operation)),
      ),
    );
    const links = operations.map(([path, verb]) =>
      make(
        "li",
        {},
        make(
          "a",
          { href: `#${anchorOf(verb, path)}` },
          make("span", { class: "verb" }, verb),
          make("span", { class: "mono" }, path),
        ),
      ),
    );
    byId("contents").append(make("h2", {}, name), make("ul", {}, ...links));
  }
}

async function load() {
  try {
    spec = await (await ask("/openapi.json")).json();
  } catch (error) {
    showError(byId("error"), error);
    return;
  }
  byId("error").replaceChildren();
  showSpec();
  if (location.hash) byId(location.hash.slice(1))?.scrollIntoView();
}

const isWide = matchMedia("(min-width: 56.01rem)");
const openContents = () => (byId("contents").open = isWide.matches); // beside the text if there is room, otherwise folded
isWide.addEventListener("change", openContents);
openContents();
wireKey(load);
load();
