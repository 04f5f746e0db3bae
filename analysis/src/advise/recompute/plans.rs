//! Plans of ONNX Runtime's Memory Optimizer: subgraphs whose outputs may be computed again in the backward pass instead of
//! being kept.
//!
//! Enters: ids such as `BiasGelu+:1:-1`, alone or joined by commas, and the JSON file that `ORTMODULE_MEMORY_OPT_CONFIG`
//! names. Leaves: ids in parts. Invariants: written as it was read; names and files are bounded, they may come from
//! anybody. Absent on purpose: which plans a model has, which only its training log says (`plan_log`).

use super::expression::{self, Dims};
use serde::de::{Deserializer as _, Error as _, IgnoredAny, SeqAccess, Visitor};
use std::fmt;
use std::io::{BufReader, Read};
use std::str::FromStr;

/// The most plans of one table or one configuration.
pub const MOST_PLANS: usize = 4_096;
/// The longest id of a plan, all its parts together, bytes.
pub const MOST_ID_BYTES: usize = 4 << 10;
/// The most bytes of one table: twelve times that are kept, as its plans are in parts.
pub(super) const MOST_TABLE_BYTES: usize = 4 << 20;
/// The longest JSON file, bytes: as many plans as there may be, each as long as it may be.
const MOST_CONFIG_BYTES: u64 = 16 << 20;
/// How much of a text a message quotes, characters.
const MOST_QUOTED: usize = 80;
/// The longest message about a file, characters: it may quote the file.
const MOST_MESSAGE: usize = 300;

/// What is done with a subgraph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Nothing.
    None,
    /// Its outputs are computed again.
    Recompute,
    /// Its outputs are computed again, and a part of them is kept all the same.
    RecomputeWithCompromise,
}

impl Strategy {
    /// As an id has it.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Recompute => 1,
            Self::RecomputeWithCompromise => 2,
        }
    }
}

/// One kind of subgraph, and what is done with it: `BiasGelu+:1:-1`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Id {
    /// The subgraph's operators, each with a `+` after it.
    pub cluster: String,
    /// What is done with it.
    pub strategy: Strategy,
    /// How many of its occurrences the strategy applies to, from the first; `None`: all.
    pub count: Option<u32>,
}

impl Id {
    /// Whether it changes anything.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.strategy != Strategy::None && self.count != Some(0)
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:", self.cluster, self.strategy.number())?;
        match self.count {
            Some(count) => write!(f, "{count}"),
            None => f.write_str("-1"),
        }
    }
}

/// Why a plan, or a list of plans, cannot be read. Texts from outside are quoted at their begin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// An id has other parts.
    #[error("`{0}` is not of the form `cluster:strategy:count`")]
    Form(String),
    /// The cluster of an id is no name.
    #[error("the cluster of `{0}` is empty or has blanks")]
    Cluster(String),
    /// The strategy of an id is not known.
    #[error("the strategy of `{0}` is not 0, 1 or 2")]
    Strategy(String),
    /// The count of an id is no number.
    #[error("the count of `{0}` is neither -1 nor a number")]
    Count(String),
    /// An id has this number of bytes.
    #[error("the id has {0} bytes, and may have {MOST_ID_BYTES}")]
    TooLong(usize),
    /// Several ids stand where one belongs.
    #[error("`{0}` is not one id")]
    NotOne(String),
    /// There are too many plans.
    #[error("there are more than {MOST_PLANS} plans")]
    TooMany,
    /// The table has too many bytes.
    #[error("the table has more than {MOST_TABLE_BYTES} bytes")]
    TableTooLarge,
    /// A row has an option that is not known.
    #[error("`{0}` is no option that is known")]
    UnknownOption(String),
    /// There are too many options.
    #[error("there are more than {MOST_PLANS} options")]
    TooManyOptions,
    /// An option belongs to no row.
    #[error("an option outside of a row")]
    StrayOption,
    /// A file is not a list of plans.
    #[error("{0}")]
    Config(String),
    /// The frequency of a row is no number.
    #[error("the frequency `{0}` is no number")]
    Frequency(String),
    /// The expression of a row has this number of bytes.
    #[error("the saving has {0} bytes, and may have {most}", most = super::expression::MOST_BYTES)]
    SavingTooLong(usize),
    /// The saving of a row is no number of bytes.
    #[error("the saving `{0}` is above 2^64 bytes")]
    SavingTooLarge(String),
}

impl FromStr for Id {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let mut parts = text.split(':');
        let (Some(cluster), Some(strategy), Some(count), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(PlanError::Form(quoted(text)));
        };
        if cluster.is_empty() || cluster.chars().any(|one| one.is_whitespace() || one.is_control() || one == ',') {
            return Err(PlanError::Cluster(quoted(text)));
        }
        let strategy = match strategy {
            "0" => Strategy::None,
            "1" => Strategy::Recompute,
            "2" => Strategy::RecomputeWithCompromise,
            _ => return Err(PlanError::Strategy(quoted(text))),
        };
        let count = match count {
            "-1" => None,
            count => match count.parse::<u32>() {
                // Neither `+1` nor `01`, which would not be written as they were read.
                Ok(number) if number.to_string() == count => Some(number),
                _ => return Err(PlanError::Count(quoted(text))),
            },
        };
        Ok(Self { cluster: cluster.to_owned(), strategy, count })
    }
}

/// Ids that take effect together: one, or several joined by `,` because one subgraph's output lies in the memory of
/// another's.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Combination(Vec<Id>);

impl Combination {
    /// Its ids, at least one.
    #[must_use]
    pub fn ids(&self) -> &[Id] {
        &self.0
    }

    /// Keeps the ids that `belongs` accepts; `None` if there are none.
    #[must_use]
    pub fn only(&self, belongs: impl FnMut(&&Id) -> bool) -> Option<Self> {
        let ids: Vec<Id> = self.0.iter().filter(belongs).cloned().collect();
        (!ids.is_empty()).then_some(Self(ids))
    }
}

impl fmt::Display for Combination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, id) in self.0.iter().enumerate() {
            write!(f, "{}{id}", if nth > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

impl FromStr for Combination {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        match text.len() {
            ..=MOST_ID_BYTES => text.split(',').map(|id| id.trim().parse()).collect::<Result<_, _>>().map(Self),
            length => Err(PlanError::TooLong(length)),
        }
    }
}

/// A row of the table in a training log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Its id.
    pub combination: Combination,
    /// Whether it is enabled.
    pub is_on: bool,
    /// How often the subgraph occurs.
    pub frequency: Option<u64>,
    /// What it saves at most, bytes, with the dimensions of the first batch.
    pub saving_bytes: Option<u64>,
    /// The same as an expression of the dimensions.
    pub expression: Option<String>,
    /// Its line in the log, from 1.
    pub line: usize,
}

impl Plan {
    /// What it saves at most, bytes: computed with `dims`, or as printed if `dims` is empty. `None` if nothing is known.
    ///
    /// # Errors
    /// The expression has no value with these dimensions.
    pub fn saving(&self, dims: &Dims) -> Result<Option<u64>, expression::ExpressionError> {
        match (&self.expression, self.saving_bytes) {
            (Some(expression), printed) if !dims.is_empty() || printed.is_none() => {
                expression::bytes(expression, dims).map(Some)
            }
            (_, printed) => Ok(printed),
        }
    }
}

/// What the older form of `ORTMODULE_MEMORY_OPT_CONFIG` enables: ids joined by commas.
///
/// # Errors
/// There are too many ids, or one cannot be read.
pub fn listed(text: &str) -> Result<Vec<Combination>, PlanError> {
    let ids: Vec<&str> = text.split(',').map(str::trim).filter(|id| !id.is_empty()).take(MOST_PLANS + 1).collect();
    if ids.len() > MOST_PLANS {
        return Err(PlanError::TooMany);
    }
    ids.iter().map(|id| id.parse()).collect()
}

/// What the newer form enables: the file that `ORTMODULE_MEMORY_OPT_CONFIG` names, a JSON list of strings.
///
/// # Errors
/// It is too large or no such list, or a plan cannot be read. A plan that was left out would no longer be enabled by what
/// is advised.
pub fn configured(file: impl Read) -> Result<Vec<Combination>, PlanError> {
    let file = BufReader::new(file.take(MOST_CONFIG_BYTES));
    let mut deserializer = serde_json::Deserializer::from_reader(file);
    let plans = deserializer.deserialize_seq(Config).and_then(|plans| deserializer.end().map(|()| plans));
    plans.map_err(|error| PlanError::Config(shown(&format!("no list of plans: {error}"), MOST_MESSAGE)))
}

struct Config;

impl<'de> Visitor<'de> for Config {
    type Value = Vec<Combination>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of plans such as [\"BiasGelu+:1:-1\"]")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut each: A) -> Result<Vec<Combination>, A::Error> {
        let mut plans = Vec::new();
        while plans.len() < MOST_PLANS {
            let Some(text) = each.next_element::<String>()? else { return Ok(plans) };
            // Level 1 writes an empty string for a combination of which it applies nothing.
            if !text.trim().is_empty() {
                plans.push(text.parse().map_err(A::Error::custom)?);
            }
        }
        match each.next_element::<IgnoredAny>()? {
            Some(_) => Err(A::Error::custom(PlanError::TooMany)),
            None => Ok(plans),
        }
    }
}

/// The begin of a text from outside, as a message can have it.
pub(super) fn quoted(text: &str) -> String {
    shown(text, MOST_QUOTED)
}

fn shown(text: &str, most: usize) -> String {
    let printable = |one: char| if one.is_control() { char::REPLACEMENT_CHARACTER } else { one };
    let more = text.chars().nth(most).map(|_| '…');
    text.chars().take(most).map(printable).chain(more).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(plans: &[Combination]) -> Vec<String> {
        plans.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn an_id_is_written_as_it_was_read() {
        for text in ["BiasGelu+:1:-1", "Cast+:2:-1", "FastGelu+:1:12", "Add+:0:0", "A+B+:1:-1,C+:2:3"] {
            assert_eq!(text.parse::<Combination>().map(|plan| plan.to_string()), Ok(text.to_owned()));
        }
        let id: Id = "Reshape+Where+:2:6".parse().expect("an id");
        let parts =
            Id { cluster: "Reshape+Where+".into(), strategy: Strategy::RecomputeWithCompromise, count: Some(6) };
        assert_eq!(id, parts);
    }

    #[test]
    fn an_id_that_cannot_be_read_says_why() {
        for (text, problem) in [
            ("", "`` is not of the form `cluster:strategy:count`"),
            ("BiasGelu+:1", "`BiasGelu+:1` is not of the form `cluster:strategy:count`"),
            ("A+:1:-1:2", "`A+:1:-1:2` is not of the form `cluster:strategy:count`"),
            (":1:-1", "the cluster of `:1:-1` is empty or has blanks"),
            ("A +:1:-1", "the cluster of `A +:1:-1` is empty or has blanks"),
            ("A+:3:-1", "the strategy of `A+:3:-1` is not 0, 1 or 2"),
            ("A+:1:-2", "the count of `A+:1:-2` is neither -1 nor a number"),
            ("A+:1:+2", "the count of `A+:1:+2` is neither -1 nor a number"),
            ("A+:1:4294967296", "the count of `A+:1:4294967296` is neither -1 nor a number"),
            ("A+:1:-1,,B+:1:-1", "`` is not of the form `cluster:strategy:count`"),
            ("A\u{7}", "`A\u{fffd}` is not of the form `cluster:strategy:count`"),
        ] {
            assert_eq!(text.parse::<Combination>().expect_err(text).to_string(), problem);
        }
        let longest = format!("{}:1:-1", "A".repeat(MOST_ID_BYTES - 5));
        assert!(longest.parse::<Combination>().is_ok());
        assert_eq!(format!("A{longest}").parse::<Combination>(), Err(PlanError::TooLong(4_097)));
        let quoting = "é".repeat(200).parse::<Id>();
        assert_eq!(quoting, Err(PlanError::Form(format!("{}…", "é".repeat(MOST_QUOTED)))));
    }

    #[test]
    fn both_forms_of_a_configuration() {
        assert_eq!(texts(&listed("BiasGelu+:1:1, Cast+:2:-1,").expect("a list")), ["BiasGelu+:1:1", "Cast+:2:-1"]);
        assert_eq!(listed(""), Ok(vec![]));
        assert_eq!(listed("BiasGelu+:1"), Err(PlanError::Form("BiasGelu+:1".to_owned())));
        let json = r#"["BiasGelu+:1:1", "", "Dropout+:1:-1,Cast+:1:-1"]"#;
        assert_eq!(texts(&configured(json.as_bytes()).expect("a list")), ["BiasGelu+:1:1", "Dropout+:1:-1,Cast+:1:-1"]);
        assert_eq!(configured("[]".as_bytes()), Ok(vec![]));
        for (json, problem) in [
            (r#"{"a": 1}"#, "expected a list of plans"),
            (r#"["A+:1:-1"] x"#, "trailing characters"),
            (r#"["A+:1:-1", 7]"#, "expected a string"),
            (r#"["A+:1:-1", "B+"]"#, "`B+` is not of the form"),
            (r#"["A+:1:-1""#, "EOF"),
            (&format!("\"{}\"", "long".repeat(1_000)), "longlong"),
        ] {
            let error = configured(json.as_bytes()).expect_err(json).to_string();
            assert!(error.contains(problem) && error.chars().count() <= 301, "{json}: {error}");
        }
    }

    #[test]
    fn configurations_are_bounded() {
        let plans = |count| vec!["A+:1:-1"; count];
        let json = |count| serde_json::to_vec(&plans(count)).expect("JSON");
        assert_eq!(configured(json(MOST_PLANS).as_slice()).map(|plans| plans.len()), Ok(MOST_PLANS));
        let refused = configured(json(MOST_PLANS + 1).as_slice()).expect_err("one more").to_string();
        assert!(refused.contains("more than 4096 plans"), "{refused}");
        assert_eq!(listed(&plans(MOST_PLANS).join(",")).map(|plans| plans.len()), Ok(MOST_PLANS));
        assert_eq!(listed(&plans(MOST_PLANS + 1).join(",")), Err(PlanError::TooMany));
        // A file without end is read to the bound.
        let endless = b"[\"".chain(std::io::repeat(b'A'));
        assert!(configured(endless).expect_err("no end").to_string().contains("EOF"));
    }

    #[test]
    fn a_saving_is_as_printed_unless_there_are_dimensions() {
        let plan = |saving_bytes, expression: Option<&str>| Plan {
            combination: "A+:1:-1".parse().expect("an id"),
            is_on: false,
            frequency: Some(1),
            saving_bytes,
            expression: expression.map(str::to_owned),
            line: 1,
        };
        let (none, some) = (Dims::new(), Dims::from([("x".to_owned(), 8)]));
        assert_eq!(plan(Some(4), Some("2.0*x")).saving(&none), Ok(Some(4)));
        assert_eq!(plan(Some(4), Some("2.0*x")).saving(&some), Ok(Some(16)));
        assert_eq!(plan(Some(4), None).saving(&some), Ok(Some(4)));
        assert_eq!(plan(None, None).saving(&some), Ok(None));
        assert!(plan(None, Some("2.0*x")).saving(&none).is_err());
    }
}
