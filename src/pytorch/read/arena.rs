//! Loaded values: flat, so that neither sharing nor depth can make them larger than what they were loaded from.

use super::Problem;

/// Values and references together; the most that is loaded. (An event of PyTorch's with a shared stack takes about 20.)
pub(super) const ITEMS_MAX: u64 = 1 << 26;

/// A value's number.
pub(super) type Id = u32;

/// A value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Node {
    None,
    Bool(bool),
    Int(i64),
    /// Above `i64::MAX`.
    Big(u64),
    Float(f64),
    /// Into [`Arena::text`].
    Str {
        at: u32,
        bytes: u32,
    },
    /// Number in [`Arena::children`].
    List(u32),
    /// The same: key, value, key, value.
    Dict(u32),
}

/// All values of a file.
#[derive(Debug, Default)]
pub(super) struct Arena {
    nodes: Vec<Node>,
    text: String,
    children: Vec<Vec<Id>>,
    items: u64,
}

impl Arena {
    /// Counts values or references.
    pub(super) fn charge(&mut self, items: usize) -> Result<(), Problem> {
        self.items += items as u64;
        if self.items > ITEMS_MAX {
            return Err(Problem::TooLarge { what: "values", limit: ITEMS_MAX });
        }
        Ok(())
    }

    pub(super) fn add(&mut self, node: Node) -> Result<Id, Problem> {
        self.charge(1)?;
        self.nodes.push(node);
        Ok((self.nodes.len() - 1) as Id) // below ITEMS_MAX
    }

    pub(super) fn add_text(&mut self, text: &str) -> Result<Id, Problem> {
        let too_large = |_| Problem::TooLarge { what: "bytes of text", limit: u64::from(u32::MAX) };
        let at = u32::try_from(self.text.len()).map_err(too_large)?;
        let bytes = u32::try_from(text.len()).map_err(too_large)?;
        self.text.push_str(text);
        self.add(Node::Str { at, bytes })
    }

    pub(super) fn add_list(&mut self, children: Vec<Id>) -> Result<Id, Problem> {
        let list = self.add_children(children)?;
        self.add(Node::List(list))
    }

    pub(super) fn add_dict(&mut self, children: Vec<Id>) -> Result<Id, Problem> {
        let list = self.add_children(children)?;
        self.add(Node::Dict(list))
    }

    fn add_children(&mut self, children: Vec<Id>) -> Result<u32, Problem> {
        self.charge(children.len() + 1)?;
        self.children.push(children);
        Ok((self.children.len() - 1) as u32)
    }

    /// Appends to a list or a dictionary.
    pub(super) fn append(&mut self, list: u32, children: &[Id]) -> Result<(), Problem> {
        self.charge(children.len())?;
        self.children[list as usize].extend_from_slice(children);
        Ok(())
    }

    pub(super) fn node(&self, id: Id) -> Node {
        self.nodes[id as usize]
    }

    /// The number of values.
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn text(&self, at: u32, bytes: u32) -> &str {
        &self.text[at as usize..(at + bytes) as usize]
    }

    pub(super) fn children(&self, list: u32) -> &[Id] {
        &self.children[list as usize]
    }

    /// A text's content.
    pub(super) fn str(&self, id: Id) -> Option<&str> {
        match self.node(id) {
            Node::Str { at, bytes } => Some(self.text(at, bytes)),
            _ => None,
        }
    }

    /// What a value is, for an error.
    pub(super) fn describe(&self, id: Id) -> String {
        match self.node(id) {
            Node::None => "None".to_owned(),
            Node::Bool(value) => value.to_string(),
            Node::Int(value) => value.to_string(),
            Node::Big(value) => value.to_string(),
            Node::Float(value) => value.to_string(),
            Node::Str { at, bytes } => {
                let text: String = self.text(at, bytes).chars().take(40).collect();
                format!("{text:?}")
            }
            Node::List(list) => format!("a list of {}", self.children(list).len()),
            Node::Dict(list) => format!("a dictionary of {}", self.children(list).len() / 2),
        }
    }
}
