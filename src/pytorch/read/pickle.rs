//! Loading pickles: the opcodes of plain data (protocols 2 to 5), and no others. Those that name or call a class or a
//! function are refused; there is nothing here that could carry them out.

use super::Problem;
use super::arena::{Arena, Id, Node};
use rustc_hash::FxHashMap;

/// Open marks; what `pickle` writes has as many as its data is deep.
const MARKS_MAX: usize = 1 << 16;

pub(super) fn load(bytes: &[u8]) -> Result<(Arena, Id), Problem> {
    let mut machine = Machine {
        bytes,
        at: 0,
        opcode_at: 0,
        arena: Arena::default(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: FxHashMap::default(),
    };
    if bytes.first() != Some(&0x80) {
        return Err(machine.wrong("not a pickle: expected 0x80 and a protocol of 2 or more, or JSON"));
    }
    let root = machine.run()?;
    Ok((machine.arena, root))
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    opcode_at: usize,
    arena: Arena,
    stack: Vec<Id>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: FxHashMap<u32, Id>,
}

impl<'a> Machine<'a> {
    fn wrong(&self, problem: impl Into<String>) -> Problem {
        Problem::Pickle { offset: self.opcode_at, problem: problem.into() }
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Problem> {
        let left = &self.bytes[self.at..];
        if left.len() < count {
            return Err(self.wrong(format!("{count} bytes expected, the file ends after {}", left.len())));
        }
        self.at += count;
        Ok(&left[..count])
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], Problem> {
        let bytes = self.take(N)?;
        Ok(bytes.try_into().expect("as many as were taken"))
    }

    fn u8(&mut self) -> Result<u8, Problem> {
        Ok(self.number::<1>()?[0])
    }

    fn u32(&mut self) -> Result<u32, Problem> {
        Ok(u32::from_le_bytes(self.number()?))
    }

    /// A length of eight bytes; what is longer than the file is an error at once.
    fn length(&mut self) -> Result<usize, Problem> {
        let length = u64::from_le_bytes(self.number()?);
        usize::try_from(length).map_err(|_| self.wrong(format!("a length of {length} bytes")))
    }

    fn pop(&mut self) -> Result<Id, Problem> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err(self.wrong("takes a value, and there is none"));
        }
        Ok(self.stack.pop().expect("above the floor"))
    }

    fn top(&self) -> Result<Id, Problem> {
        self.stack.last().copied().ok_or_else(|| self.wrong("takes a value, and there is none"))
    }

    fn push(&mut self, id: Id) -> Result<(), Problem> {
        self.arena.charge(1)?; // a reference that is on the stack for a byte or two of the file
        self.stack.push(id);
        Ok(())
    }

    fn node(&mut self, node: Node) -> Result<(), Problem> {
        let id = self.arena.add(node)?;
        self.push(id)
    }

    /// What was pushed since the last mark.
    fn since_mark(&mut self) -> Result<Vec<Id>, Problem> {
        let mark = self.marks.pop().ok_or_else(|| self.wrong("goes back to a mark, and there is none"))?;
        Ok(self.stack.split_off(mark))
    }

    fn text(&mut self, length: usize) -> Result<(), Problem> {
        let bytes = self.take(length)?;
        // Python writes lone surrogates in a way of its own; a name with one is still a name.
        let text = String::from_utf8_lossy(bytes);
        let id = self.arena.add_text(&text)?;
        self.push(id)
    }

    fn int(&mut self, length: usize) -> Result<(), Problem> {
        let bytes = self.take(length)?;
        if length > 9 {
            return Err(self.wrong(format!("an integer of {length} bytes; 64 bits are the most")));
        }
        let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 16];
        wide[..length].copy_from_slice(bytes);
        let value = i128::from_le_bytes(wide);
        let node = match (i64::try_from(value), u64::try_from(value)) {
            (Ok(value), _) => Node::Int(value),
            (_, Ok(value)) => Node::Big(value),
            _ => return Err(self.wrong(format!("the integer {value}; 64 bits are the most"))),
        };
        self.node(node)
    }

    fn list(&mut self, children: Vec<Id>) -> Result<(), Problem> {
        let id = self.arena.add_list(children)?;
        self.push(id)
    }

    fn append(&mut self, children: &[Id]) -> Result<(), Problem> {
        match self.arena.node(self.top()?) {
            Node::List(list) => self.arena.append(list, children),
            _ => Err(self.wrong("appends to what is no list")),
        }
    }

    fn set(&mut self, children: &[Id]) -> Result<(), Problem> {
        if !children.len().is_multiple_of(2) {
            return Err(self.wrong("a key without a value"));
        }
        match self.arena.node(self.top()?) {
            Node::Dict(list) => self.arena.append(list, children),
            _ => Err(self.wrong("sets items of what is no dictionary")),
        }
    }

    fn put(&mut self, number: u32) -> Result<(), Problem> {
        self.arena.charge(1)?;
        let top = self.top()?;
        self.memo.insert(number, top);
        Ok(())
    }

    fn get(&mut self, number: u32) -> Result<(), Problem> {
        match self.memo.get(&number) {
            Some(&id) => self.push(id),
            None => Err(self.wrong(format!("recalls value {number}, which was not remembered"))),
        }
    }

    fn tuple(&mut self, length: usize) -> Result<(), Problem> {
        let mut children = Vec::with_capacity(length);
        for _ in 0..length {
            children.push(self.pop()?);
        }
        children.reverse();
        self.list(children)
    }

    fn run(&mut self) -> Result<Id, Problem> {
        loop {
            self.opcode_at = self.at;
            let opcode = match self.bytes.get(self.at) {
                Some(opcode) => *opcode,
                None => return Err(self.wrong("the file ends before the pickle does (it was cut off)")),
            };
            self.at += 1;
            match opcode {
                b'.' => {
                    let root = self.pop()?;
                    return if self.stack.is_empty() { Ok(root) } else { Err(self.wrong("values are left over")) };
                }
                0x80 => {
                    let protocol = self.u8()?;
                    if !(2..=5).contains(&protocol) {
                        return Err(self.wrong(format!("protocol {protocol}; 2 to 5 are read")));
                    }
                }
                0x95 => drop(self.take(8)?), // a frame's length: a hint for buffers
                b'(' => {
                    if self.marks.len() == MARKS_MAX {
                        return Err(self.wrong("nested too deeply"));
                    }
                    self.marks.push(self.stack.len());
                }
                b'N' => self.node(Node::None)?,
                0x88 => self.node(Node::Bool(true))?,
                0x89 => self.node(Node::Bool(false))?,
                b'J' => {
                    let value = i32::from_le_bytes(self.number()?);
                    self.node(Node::Int(value.into()))?;
                }
                b'K' => {
                    let value = self.u8()?;
                    self.node(Node::Int(value.into()))?;
                }
                b'M' => {
                    let value = u16::from_le_bytes(self.number()?);
                    self.node(Node::Int(value.into()))?;
                }
                0x8a => {
                    let length = self.u8()?;
                    self.int(length.into())?;
                }
                0x8b => {
                    let length = self.u32()?;
                    self.int(length as usize)?;
                }
                b'G' => {
                    let value = f64::from_be_bytes(self.number()?);
                    self.node(Node::Float(value))?;
                }
                0x8c => {
                    let length = self.u8()?;
                    self.text(length.into())?;
                }
                b'X' => {
                    let length = self.u32()?;
                    self.text(length as usize)?;
                }
                0x8d => {
                    let length = self.length()?;
                    self.text(length)?;
                }
                b']' | b')' => self.list(Vec::new())?,
                b'}' => {
                    let id = self.arena.add_dict(Vec::new())?;
                    self.push(id)?;
                }
                b'l' | b't' => {
                    let children = self.since_mark()?;
                    self.list(children)?;
                }
                b'd' => {
                    let children = self.since_mark()?;
                    if !children.len().is_multiple_of(2) {
                        return Err(self.wrong("a key without a value"));
                    }
                    let id = self.arena.add_dict(children)?;
                    self.push(id)?;
                }
                0x85..=0x87 => self.tuple(usize::from(opcode - 0x84))?,
                b'a' => {
                    let child = self.pop()?;
                    self.append(&[child])?;
                }
                b'e' => {
                    let children = self.since_mark()?;
                    self.append(&children)?;
                }
                b's' => {
                    let value = self.pop()?;
                    let key = self.pop()?;
                    self.set(&[key, value])?;
                }
                b'u' => {
                    let children = self.since_mark()?;
                    self.set(&children)?;
                }
                0x94 => {
                    let number = u32::try_from(self.memo.len()).map_err(|_| self.wrong("too many values"))?;
                    self.put(number)?;
                }
                b'q' => {
                    let number = self.u8()?;
                    self.put(number.into())?;
                }
                b'r' => {
                    let number = self.u32()?;
                    self.put(number)?;
                }
                b'h' => {
                    let number = self.u8()?;
                    self.get(number.into())?;
                }
                b'j' => {
                    let number = self.u32()?;
                    self.get(number)?;
                }
                b'c' | b'i' | b'o' | b'R' | b'b' | 0x81 | 0x82..=0x84 | 0x92 | 0x93 | b'P' | b'Q' => {
                    return Err(self.wrong(format!(
                        "opcode {opcode:#04x} names or calls a Python object; a snapshot is plain data and has none, \
                         so this file is refused"
                    )));
                }
                _ => return Err(self.wrong(format!("opcode {opcode:#04x} is not one of a snapshot"))),
            }
        }
    }
}
