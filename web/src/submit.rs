//! The form for a new job. The form works without a script. `static/submit.js` adds checks while the reader types, and the job file beside
//! the form.
//!
//! A field's name is its path in the specification (`train.lr`), so a mistake at `/train/lr` belongs to this field.

use crate::{layout::CurrentUser, numbers::plural};
use askama::Template;
use fields::{FIELDS, Field};
use form::{DEFAULTS, recipe_values};
use lockstep_protocol::{
    dataset::Dataset,
    spec::{Kind, Recipe, SpecError},
    suggestion::Suggestion,
};
use presets::{PRESETS, Preset, preset_form};
use std::{collections::BTreeMap, slice};

mod fields;
mod form;
mod presets;

pub use form::{Form, job_file};

/// The keys of the form's fields, by their labels in lower case.
pub fn labels() -> BTreeMap<String, &'static str> {
    FIELDS.iter().rev().map(|field| (field.label.to_lowercase(), field.key)).collect()
}

/// `GET /jobs/new`, and the response to a `POST /jobs/new` with mistakes.
#[derive(Debug, Clone, Template)]
#[template(path = "submit.html")]
pub struct SubmitPage {
    /// The content of the fields.
    pub form: Form,
    /// For a clone, how `form` differs from the cloned job. Empty otherwise.
    pub differences: String,
    /// Mistakes in `form`, each shown next to its field.
    pub mistakes: Vec<SpecError>,
    pub datasets: Vec<Dataset>,
    /// Number of slots of all online machines, free or not.
    pub slots: u32,
    /// This server's URL in the browser. Commands on the page contain it.
    pub server_url: String,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}

impl SubmitPage {
    /// Creates a new form from the named preset (`?preset=cifar10`). Otherwise, creates a form for the named dataset (`?dataset=flowers`)
    /// or the newest dataset without broken files, with the preset for its pictures if there is one. To submit a job again (`?from={id}`),
    /// build the page with [`Form::from_spec`] instead.
    pub fn fresh(
        preset: Option<&str>,
        dataset: Option<&str>,
        datasets: Vec<Dataset>,
        slots: u32,
        server_url: String,
        user: CurrentUser,
    ) -> Self {
        let chosen = match dataset {
            Some(name) => datasets.iter().find(|d| d.name == name),
            None => datasets.iter().max_by_key(|d| (d.info.broken_count == 0, d.added_at)),
        };
        let only_chosen = chosen.map(slice::from_ref).unwrap_or_default();
        let named = PRESETS.iter().find(|p| Some(p.key) == preset).map(|p| preset_form(p, slots, &datasets));
        let matching_preset = || PRESETS.iter().find(|p| p.dataset(only_chosen).is_some());
        let matching_form = || matching_preset().map(|p| preset_form(p, slots, only_chosen));
        let mut form = named.or_else(matching_form).or_else(|| suggested_form(chosen)).unwrap_or_else(|| {
            let mut form = DEFAULTS.clone();
            form.set("name", "my-first-job");
            form.set("data.dataset", chosen.map_or("", |d| &d.name));
            form
        });
        if let Some(dataset) = dataset {
            form.set("data.dataset", dataset);
        }
        Self { form, differences: String::new(), mistakes: Vec::new(), datasets, slots, server_url, user }
    }

    /// Returns, in groups, the fields under "More settings" or the fields that are always shown.
    fn groups(&self, is_in_more: bool) -> Vec<(&'static str, Vec<FieldView>)> {
        let recipe = recipe_values(&self.form.filled_recipe);
        let view = |f: &'static Field| FieldView {
            field: f,
            value: self.form.text(f.key).to_owned(),
            default: DEFAULTS.text(f.key),
            is_set_by_recipe: recipe.contains_key(f.key),
            errors: self.mistakes.iter().filter(|m| is_about(m, f)).map(|m| m.detail.clone()).collect(),
        };
        let fields: Vec<_> = FIELDS.iter().filter(|field| field.is_in_more == is_in_more).collect();
        let groups = fields.chunk_by(|a, b| a.group == b.group);
        groups.map(|group| (group[0].group, group.iter().copied().map(view).collect())).collect()
    }

    /// Returns the job file that the form describes.
    fn job_file(&self) -> String {
        job_file(&self.form.document())
    }

    /// Returns the id of a section of "More settings".
    fn section_id(&self, title: &str) -> String {
        format!("more-{}", title.to_lowercase().replace(' ', "-"))
    }

    /// Returns the field of each mistake, if the mistake belongs to a field, and the mistake's description.
    fn listed_mistakes(&self) -> Vec<(Option<&'static Field>, &str)> {
        let field = |mistake: &SpecError| FIELDS.iter().find(|field| is_about(mistake, field));
        self.mistakes.iter().map(|mistake| (field(mistake), mistake.detail.as_str())).collect()
    }

    /// Whether "More settings" must be open, because a field in it has a mistake or sets the job's length (`train.steps`).
    fn is_more_open(&self) -> bool {
        let has_steps = self.form.values.get("train.steps").is_some_and(|steps| !steps.is_empty());
        let is_in_more = |mistake: &SpecError| FIELDS.iter().any(|f| f.is_in_more && is_about(mistake, f));
        has_steps || self.mistakes.iter().any(is_in_more)
    }

    /// Whether no dataset has the name of the bundled pictures.
    fn lacks_bundled(&self) -> bool {
        self.datasets.iter().all(|dataset| dataset.name != "fashion-mnist")
    }

    /// Returns key, title and description of each preset, and the values with which the script fills fields.
    fn presets(&self) -> Vec<(&'static str, &'static str, String, BTreeMap<String, String>)> {
        let values = |p| preset_form(p, self.slots, &self.datasets).values;
        let about = |p: &Preset| {
            let lacks_cifar10 =
                p.values.contains(&("data.dataset", "cifar10")) && p.dataset(&self.datasets).is_none();
            let first = if lacks_cifar10 {
                "; first run “lockstep dataset get cifar10” in a terminal"
            } else {
                ""
            };
            format!("{}{first}", p.about)
        };
        PRESETS.iter().map(|p| (p.key, p.title, about(p), values(p))).collect()
    }

    /// Returns the values with which the script fills fields when a recipe is chosen.
    fn recipes(&self) -> BTreeMap<&'static str, BTreeMap<String, String>> {
        Recipe::NAMES.into_iter().map(|name| (name, recipe_values(name))).collect()
    }

    /// Returns name and description of each dataset, and whether it is selected. Includes the form's dataset if it is not registered.
    fn dataset_options(&self) -> Vec<(String, String, bool)> {
        let chosen = self.form.text("data.dataset");
        let mut options: Vec<_> = self
            .datasets
            .iter()
            .map(|d| {
                let train = d.info.splits.iter().find(|s| s.name == "train").or(d.info.splits.first());
                let pictures = train.map_or(0, |s| s.samples);
                let broken = match d.info.broken_count {
                    0 => String::new(),
                    n => format!(", {}", plural(n, "unusable file")),
                };
                let (pictures, classes) =
                    (plural(pictures, "picture"), plural(d.info.classes.len() as u64, "class"));
                let about = format!("{}, {pictures}, {classes}{broken}", d.name);
                (d.name.clone(), about, d.name == chosen)
            })
            .collect();
        if !chosen.is_empty() && !options.iter().any(|(_, _, chosen)| *chosen) {
            options.push((chosen.to_owned(), format!("{chosen}, not registered"), true));
        }
        options
    }

    /// Describes the online slots, as the hint of the field Ranks.
    fn slots_hint(&self) -> String {
        match self.slots {
            0 => "no machine is online: the job will wait".into(),
            n => format!("{} online", plural(n.into(), "slot")),
        }
    }
}

/// Returns a form with the values that `lockstep init` suggests for the dataset's pictures.
fn suggested_form(dataset: Option<&Dataset>) -> Option<Form> {
    let Dataset { name, info, .. } = dataset?;
    Suggestion::of(info).ok()?.spec(name).map(|spec| Form::from_spec(&spec))
}

/// Whether a mistake belongs to a field: its path is the path of the field or of an element of the field's list.
fn is_about(mistake: &SpecError, field: &Field) -> bool {
    let path = mistake.pointer.trim_start_matches('/').replace('/', ".");
    path == field.key || path.strip_prefix(field.key).is_some_and(|rest| rest.starts_with('.'))
}

struct FieldView {
    field: &'static Field,
    value: String,
    default: &'static str,
    /// Whether the form's recipe sets the key.
    is_set_by_recipe: bool,
    errors: Vec<String>,
}

impl FieldView {
    /// Returns the text in the field. A default is shown as the placeholder instead, unless the recipe sets the key: the recipe would
    /// replace an empty field.
    fn input_text(&self) -> &str {
        if self.value == self.default && !self.is_set_by_recipe { "" } else { &self.value }
    }

    /// Returns each choice, its text, and whether it is selected.
    fn options(&self) -> Vec<(&'static str, String, bool)> {
        let Kind::Word(words) = self.field.kind else { return Vec::new() };
        // A key without a default may have no value.
        let none = self.default.is_empty().then_some("");
        let text = |option: &str| match option.parse::<Recipe>() {
            Ok(recipe) if self.field.key == "train.recipe" => {
                format!("{option}: {}", recipe.settings().about)
            }
            _ if option.is_empty() => "none".to_owned(),
            _ => option.to_owned(),
        };
        let options = none.into_iter().chain(words.iter().copied());
        options.map(|option| (option, text(option), option == self.value)).collect()
    }

    fn input_mode(&self) -> &'static str {
        match self.field.kind {
            Kind::Whole { .. } | Kind::Seed => "numeric",
            Kind::Number { .. } => "decimal",
            _ => "text",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::{
        JobSpec,
        dataset::{DatasetInfo, SplitInfo},
        spec::{Arch, ClassWeights, ImageSize, ScheduleKind, ShardSpec, SizeFrom, Split, from_json},
    };

    #[test]
    fn the_form_suggests_settings_for_the_dataset() {
        let photographs = Dataset {
            name: "flowers".into(),
            path: "/data/flowers".into(),
            info: DatasetInfo {
                format: "image_folder".into(),
                classes: vec!["rose".into(), "tulip".into()],
                splits: vec![SplitInfo { name: "train".into(), samples: 800, per_class: vec![400, 400] }],
                height: 0,
                width: 0,
                channels: 3,
                mean: vec![0.5; 3],
                std: vec![0.2; 3],
                ..DatasetInfo::default()
            },
            added_at: "2026-01-02T03:04:05Z".parse().unwrap(),
            owner: None,
            private: false,
        };
        let new_page = |dataset, datasets| {
            SubmitPage::fresh(None, dataset, datasets, 2, String::new(), CurrentUser::NOBODY)
        };
        let fresh = |dataset| new_page(dataset, vec![photographs.clone()]).form;
        for form in [fresh(Some("flowers")), fresh(None)] {
            for (key, value) in [
                ("data.dataset", "flowers"),
                ("data.validation", "0.2"),
                ("data.image_size", "224"),
                ("data.random_resized_crop", "true"),
                ("model.arch", "resnet18"),
            ] {
                assert_eq!(form.text(key), value, "{key}");
            }
        }
        assert_eq!(fresh(Some("unknown")).text("data.dataset"), "unknown");

        // The newest dataset without broken files comes first, and defaults are placeholders.
        let added = |name: &str, hours: i64, broken_count: u64| Dataset {
            name: name.into(),
            info: DatasetInfo { broken_count, ..photographs.info.clone() },
            added_at: photographs.added_at + jiff::SignedDuration::from_hours(hours),
            ..photographs.clone()
        };
        let all = vec![added("newer", 1, 0), photographs.clone(), added("broken", 2, 1)];
        let page = new_page(None, all);
        assert_eq!(page.form.text("data.dataset"), "newer");
        let html = page.render().expect("renders");
        assert!(html.contains(r#"name="train.seed" value="" placeholder="0""#), "{html}");
        assert!(html.contains(r#"placeholder="untitled" data-default="""#), "{html}");
    }

    #[test]
    fn the_form_has_one_field_for_every_key() {
        let mut fields: Vec<_> = FIELDS.iter().map(|field| field.key.to_owned()).collect();
        let mut keys: Vec<_> = fields::keys().map(|(path, _)| path).collect();
        fields.sort();
        keys.sort();
        assert_eq!(fields, keys);
    }

    #[test]
    fn a_form_is_converted_back_to_its_specification() {
        let mut spec = JobSpec { name: "x".into(), ..JobSpec::default() };
        spec.data.dataset = "cifar10".into();
        spec.data.mean = Some(vec![0.4914, 0.4822, 0.4465]);
        (spec.project, spec.notes) = ("vision".into(), "a note".into());
        spec.tags = vec!["baseline".into(), "two words".into()];
        spec.train.lr = 0.1;
        spec.train.milestones = vec![3, 6];
        (spec.parallel.mode, spec.parallel.model) = ("hybrid".into(), 2);
        let shard = |pattern: &str, split| ShardSpec { pattern: pattern.into(), split };
        spec.parallel.shard = vec![shard("layer4.*", Split::Out), shard("fc", Split::In)];
        let sizes = [SizeFrom { epoch: 1, size: 128 }, SizeFrom { epoch: 4, size: 192 }].to_vec();
        for size in [ImageSize::Fixed(64), ImageSize::Schedule(sizes)] {
            spec.data.image_size = Some(size);
            let document = Form::from_spec(&spec).document();
            assert_eq!(document["train"]["lr"].to_string(), "0.1");
            let back: JobSpec = serde_json::from_value(document).expect("of the right types");
            assert_eq!(back, spec);
        }
        for weights in [
            ClassWeights::Rule("balanced".into()),
            ClassWeights::InOrder(vec![0.5, 2.0]),
            ClassWeights::ByName([("cat".to_owned(), 2.5)].into()),
        ] {
            spec.loss.class_weights = Some(weights);
            let back: JobSpec = serde_json::from_value(Form::from_spec(&spec).document()).expect("types");
            assert_eq!(back.loss, spec.loss);
        }
    }

    #[test]
    fn posted_forms_keep_invalid_text_and_boxes_that_are_off() {
        let pairs = [("train.lr", "fast"), ("name", "x"), ("data.vertical_flip", "true"), ("evil", "1")];
        let form = Form::from_pairs(pairs.map(|(k, v)| (k.to_owned(), v.to_owned())));
        let document = form.document();
        assert_eq!(document["train"]["lr"], "fast");
        assert_eq!(document["data"]["vertical_flip"], true);
        assert_eq!(document["data"]["drop_remainder"], false);
        assert!(document.get("evil").is_none());
    }

    #[test]
    fn a_recipe_replaces_only_unchanged_fields() {
        let mut form = DEFAULTS.clone();
        form.set("data.dataset", "flowers");
        form.set("train.gamma", "0.2");
        form.set("train.recipe", "imagenet");
        let spec = from_json(&form.document()).expect("a specification");
        assert_eq!((spec.train.epochs, spec.train.gamma), (Some(90), 0.2));
        assert_eq!((spec.train.lr, spec.data.random_resized_crop), (0.1 * 32.0 / 256.0, true));

        // Another recipe replaces the values of the first.
        let mut form = Form::from_spec(&spec);
        form.set("train.lr", "");
        form.set("model.pretrained", "x.safetensors");
        form.set("train.recipe", "finetune");
        let other = from_json(&form.document()).expect("a specification");
        assert_eq!((other.train.epochs, other.train.schedule), (Some(10), ScheduleKind::Cosine));
        assert_eq!((other.train.gamma, other.train.lr), (0.2, 0.01 * 32.0 / 256.0));

        // Weights of this server get pictures as their job prepared them, and the other settings of the recipe.
        let mut trained = spec.clone();
        (trained.data.image_size, trained.data.mean, trained.train.mixup) = (None, None, 0.2);
        let info = DatasetInfo { height: 32, width: 32, mean: vec![0.5; 3], ..DatasetInfo::default() };
        let mut form = Form::finetuning(trained, "models:/shoes/1", Some(&info));
        form.set("data.dataset", "boots");
        let own = from_json(&form.document()).expect("a specification");
        assert_eq!((own.data.image_size, own.data.mean), (Some(ImageSize::Fixed(32)), Some(vec![0.5; 3])));
        assert_eq!((own.train.epochs, own.train.lr, own.train.mixup), (Some(10), 0.01 * 32.0 / 256.0, 0.0));

        // Public weights have their own network, and pictures as in the recipe.
        let mut small = spec.clone();
        (small.model.arch, small.data.image_size) = (Arch::ResNet20, Some(ImageSize::Fixed(32)));
        let public =
            from_json(&Form::finetuning(small, "resnet18", Some(&info)).document()).expect("a specification");
        assert_eq!(
            (public.model.arch, public.data.image_size),
            (Arch::ResNet18, Some(ImageSize::Fixed(224)))
        );

        // Values of the recipe are left out, and other values are sent.
        let mut form = Form::from_spec(&spec);
        form.set("train.weight_decay", "0");
        let again = from_json(&form.document()).expect("a specification");
        assert_eq!((again.train.weight_decay, again.train.recipe), (0.0, Some(Recipe::Imagenet)));
        assert_eq!(
            job_file(&form.document()),
            "name = \"untitled\"\n\n[data]\ndataset = \"flowers\"\n\n\
             [train]\nepochs = 90\ngamma = 0.2\nlr = 0.0125\nrecipe = \"imagenet\"\nweight_decay = 0\n"
        );

        // Settings that scale with the epochs are sent only if the user has changed them.
        form.set("train.epochs", "30");
        let shorter = from_json(&form.document()).expect("a specification");
        assert_eq!((shorter.train.epochs, &shorter.train.milestones[..]), (Some(30), &[10, 20][..]));
        form.set("train.milestones", "5");
        let own = from_json(&form.document()).expect("a specification");
        assert_eq!(own.train.milestones, [5]);
    }

    #[test]
    fn errors_are_shown_beside_their_field_in_more_settings_or_above_the_form() {
        let mistake =
            |pointer: &str, detail: &str| SpecError { pointer: pointer.into(), detail: detail.into() };
        let mistakes = vec![mistake("/train/seed", "not a number"), mistake("/train", "epochs or steps")];
        let page = SubmitPage::fresh(Some("cifar10"), None, vec![], 2, String::new(), CurrentUser::NOBODY);
        let html = SubmitPage { mistakes, ..page }.render().expect("renders");
        assert!(html.contains("<details class=\"more\" open>") && html.contains("epochs or steps"), "{html}");
        assert!(html.contains(r#"id="f-train-seed-error">not a number<"#), "{html}");
    }

    #[test]
    fn presets_are_valid_specifications() {
        for preset in &PRESETS {
            let document = preset_form(preset, 8, &[]).document();
            let spec: Result<JobSpec, _> = serde_json::from_value(document);
            assert!(spec.is_ok(), "{}: {spec:?}", preset.key);
        }
    }
}
