//! Loading JSON.

use super::Problem;
use super::arena::{Arena, Id, Node};
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::fmt;

pub(super) fn load(bytes: &[u8]) -> Result<(Arena, Id), Problem> {
    let mut arena = Arena::default();
    let mut problem = None;
    // Its depth is limited by the library.
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let root = Seed { arena: &mut arena, problem: &mut problem }.deserialize(&mut json);
    let root = root.and_then(|root| json.end().map(|()| root));
    match (root, problem) {
        (_, Some(problem)) => Err(problem),
        (Ok(root), None) => Ok((arena, root)),
        (Err(error), None) => Err(Problem::Json { problem: error.to_string() }),
    }
}

/// Puts one value into the arena.
struct Seed<'a> {
    arena: &'a mut Arena,
    /// Why it stopped, if that was not the text's fault.
    problem: &'a mut Option<Problem>,
}

impl Seed<'_> {
    fn kept<E: Error>(self, id: Result<Id, Problem>) -> Result<Id, E> {
        id.map_err(|problem| {
            *self.problem = Some(problem);
            E::custom("too large")
        })
    }

    fn inner(&mut self) -> Seed<'_> {
        Seed { arena: self.arena, problem: self.problem }
    }

    fn node<E: Error>(self, node: Node) -> Result<Id, E> {
        let id = self.arena.add(node);
        self.kept(id)
    }
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Id;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Id, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Id;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<Id, E> {
        self.node(Node::None)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Id, E> {
        self.node(Node::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Id, E> {
        self.node(Node::Int(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Id, E> {
        self.node(i64::try_from(value).map_or(Node::Big(value), Node::Int))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Id, E> {
        self.node(Node::Float(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Id, E> {
        let id = self.arena.add_text(value);
        self.kept(id)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<Id, A::Error> {
        let mut children = Vec::new();
        while let Some(child) = seq.next_element_seed(self.inner())? {
            children.push(child);
        }
        let id = self.arena.add_list(children);
        self.kept(id)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Id, A::Error> {
        let mut children = Vec::new();
        while let Some(key) = map.next_key_seed(self.inner())? {
            children.push(key);
            children.push(map.next_value_seed(self.inner())?);
        }
        let id = self.arena.add_dict(children);
        self.kept(id)
    }
}
