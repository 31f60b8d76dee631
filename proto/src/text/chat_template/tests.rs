//! Tests of every golden rendering, of the places where templates are found, and of Python's ways.

use serde_json::json;

use super::*;

fn golden() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/golden/chat-templates/golden.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn request<'a>(messages: &'a Value, kwargs: &'a Map<String, Value>) -> RenderRequest<'a> {
    RenderRequest {
        messages,
        tools: None,
        add_generation_prompt: false,
        continue_final_message: false,
        kwargs,
    }
}

/// A folder with the given files.
fn load(files: &[(&str, Value)]) -> anyhow::Result<Option<ChatTemplate>> {
    let dir = tempfile::tempdir().unwrap();
    for (name, contents) in files {
        let text = contents.as_str().map_or_else(|| contents.to_string(), str::to_owned);
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    ChatTemplate::load(dir.path())
}

fn loaded(files: &[(&str, Value)]) -> ChatTemplate {
    load(files).unwrap().expect("there is a template")
}

fn of(template: &str) -> ChatTemplate {
    loaded(&[("tokenizer_config.json", json!({"chat_template": template}))])
}

#[track_caller]
fn check(template: &str, expect: &str) {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let text = of(template).render(&request(&messages, &Map::new()));
    assert_eq!(text.unwrap(), expect, "{template}");
}

#[test]
fn every_golden_rendering() {
    let golden = golden();
    let renderings = golden["renderings"].as_array().unwrap();
    assert!(renderings.len() > 100);
    for rendering in renderings {
        let name = rendering["template"].as_str().unwrap();
        let template = loaded(&[("tokenizer_config.json", golden["templates"][name].clone())]);
        let mut kwargs = Map::new();
        if let Some(thinking) = rendering.get("enable_thinking").filter(|value| !value.is_null()) {
            kwargs.insert("enable_thinking".into(), thinking.clone());
        }
        let messages = &golden["messages"][rendering["messages"].as_str().unwrap()];
        let text = template.render(&RenderRequest {
            tools: (rendering["tools"] == true).then_some(&golden["tools"]),
            add_generation_prompt: rendering["add_generation_prompt"] == true,
            ..request(messages, &kwargs)
        });
        let mut label = rendering.clone();
        label.as_object_mut().unwrap().shift_remove("text");
        match rendering["text"].as_str() {
            Some(expect) => assert_eq!(text.unwrap(), expect, "{label}"),
            None => drop(text.expect_err(&label.to_string())),
        }
    }
}

#[test]
fn templates_are_found_in_every_layout() {
    let bare = json!({"bos_token": "<s>"});
    let in_config = json!({"bos_token": "<s>", "chat_template": "config"});
    let messages = json!([]);
    let text = |files: &[(&str, Value)]| loaded(files).render(&request(&messages, &Map::new())).unwrap();
    assert_eq!(text(&[("tokenizer_config.json", in_config.clone())]), "config");
    let own_file = ("chat_template.jinja", json!("own {{ bos_token }}"));
    assert_eq!(text(&[("tokenizer_config.json", in_config.clone()), own_file]), "own <s>");
    let json_file = ("chat_template.json", json!({"chat_template": "json {{ bos_token }}"}));
    assert_eq!(text(&[("tokenizer_config.json", bare.clone()), json_file]), "json <s>");
    assert!(load(&[("tokenizer_config.json", bare)]).unwrap().is_none());
    assert!(load(&[]).unwrap().is_none());
}

#[test]
fn named_templates_are_chosen_by_tools() {
    let named = json!({"chat_template": [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]});
    let template = loaded(&[("tokenizer_config.json", named)]);
    let (messages, kwargs, tools) = (json!([]), Map::new(), json!([1, 2]));
    assert_eq!(template.render(&request(&messages, &kwargs)).unwrap(), "plain");
    let with_tools = RenderRequest { tools: Some(&tools), ..request(&messages, &kwargs) };
    assert_eq!(template.render(&with_tools).unwrap(), "tools 2");
}

#[test]
fn special_tokens_may_be_maps() {
    let config = json!({
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ additional_special_tokens | join }}",
        "bos_token": {"content": "<s>", "lstrip": false, "special": true},
        "eos_token": "</s>",
        "pad_token": null,
        "additional_special_tokens": [{"content": "<a>"}, "<b>"],
    });
    let map = json!({"bos_token": "<old>", "pad_token": "<pad>"});
    let template = loaded(&[("tokenizer_config.json", config), ("special_tokens_map.json", map)]);
    let text = template.render(&request(&json!([]), &Map::new())).unwrap();
    assert_eq!(text, "<s></s><pad><a><b>");
}

#[test]
fn broken_templates_are_refused_at_load() {
    let error = |entry: Value| {
        let files = [("tokenizer_config.json", json!({"chat_template": entry}))];
        format!("{:#}", load(&files).err().expect("loaded"))
    };
    assert!(error(json!("{% if %}")).contains("chat template"));
    assert!(error(json!(7)).contains("neither a string"));
    assert!(error(json!([{"name": "default"}])).contains("no name or no template"));
    assert!(error(json!([{"name": "a", "template": ""}, {"name": "b", "template": ""}])).contains("default"));
}

#[test]
fn values_print_as_python_prints_them() {
    check("{{ true }} {{ none }} {{ 1.0 }} {{ 2 }}", "True None 1.0 2");
    check("{{ [1, 'a', \"it's\"] }} {{ {'k': none} }} {{ nothing }}", r#"[1, 'a', "it's"] {'k': None} "#);
    check("{{ false | string }} {{ [true] | string }}", "False [True]");
    check("{{ messages[0].content is iterable }}", "True");
}

#[test]
fn json_reads_as_transformers_writes_it() {
    check("{{ {'b': 1, 'a': [1.0, none, true]} | tojson }}", r#"{"b": 1, "a": [1.0, null, true]}"#);
    check("{{ {'b': 1, 'a': {}} | tojson(indent=2) }}", "{\n  \"b\": 1,\n  \"a\": {}\n}");
    check("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", r#"{"a":2,"b":1}"#);
    check("{{ [1.0, 1e16, 0.00001, 0.0001, -2.5e-7] | tojson }}", "[1.0, 1e+16, 1e-05, 0.0001, -2.5e-07]");
    check("{{ '<é&\"😀' | tojson }}", "\"<é&\\\"😀\"");
    check("{{ 'é😀' | tojson(ensure_ascii=true) }}", r#""\u00e9\ud83d\ude00""#);
    check("{{ ({'a': 1} | tojson)[:-1] }}", r#"{"a": 1"#);
    let undefined = of("{{ nothing | tojson }}").render(&request(&json!([]), &Map::new()));
    assert!(matches!(undefined, Err(TemplateError::Failed(_))));
}

#[test]
fn statements_of_transformers_work() {
    check("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13");
    check("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1");
    check("a\n  {% if true %}\n  b\n  {% endif %}\nc", "a\n  b\nc");
    check(
        "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration -%}{% endfor %}",
        "hi",
    );
    check("{{ strftime_now('%Y') | length }}", "4");
    check("{{ messages[0].get('name', 'none') }}{{ 'a,b'.split(',')[-1] }}", "noneb");
}

#[test]
fn the_templates_own_refusal_is_told_apart() {
    let messages = json!([]);
    let raised = of("{{ raise_exception('only users') }}").render(&request(&messages, &Map::new()));
    assert!(matches!(raised, Err(TemplateError::Raised(message)) if message == "only users"));
    let failed = of("{{ messages[0].content.x }}").render(&request(&messages, &Map::new()));
    assert!(matches!(failed, Err(TemplateError::Failed(_))));
}

#[test]
fn kwargs_are_variables_but_never_replace_the_messages() {
    let kwargs = json!({"tone": "dry", "messages": "no"}).as_object().unwrap().clone();
    let messages = json!([{"role": "user", "content": "hi"}]);
    let text =
        of("{{ tone }} {{ messages | length }} {{ tools is none }}").render(&request(&messages, &kwargs));
    assert_eq!(text.unwrap(), "dry 1 True");
}

#[test]
fn a_final_message_is_continued_behind_its_text() {
    let template =
        of("{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}!{% endif %}");
    let trimming = of("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}");
    let kwargs = Map::new();
    let continued = |template: &ChatTemplate, content: Value| {
        let messages =
            json!([{"role": "user", "content": "a b "}, {"role": "assistant", "content": content}]);
        template.render(&RenderRequest { continue_final_message: true, ..request(&messages, &kwargs) })
    };
    assert_eq!(continued(&template, json!(" a b ")).unwrap(), "<a b >< a b ");
    assert_eq!(continued(&trimming, json!(" a b ")).unwrap(), "<a b><a b");
    assert!(matches!(continued(&template, json!(" ")), Err(TemplateError::NothingToContinue)));
    let silent = continued(&of("nothing"), json!("a"));
    assert!(matches!(silent, Err(TemplateError::FinalMessageChanged)));
    let both = RenderRequest {
        continue_final_message: true,
        add_generation_prompt: true,
        ..request(&Value::Null, &kwargs)
    };
    assert!(matches!(template.render(&both), Err(TemplateError::ContinuesAndStarts)));
}
