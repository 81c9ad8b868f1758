//! How ranks find each other, and the stand-in for a collective: all are connected to rank 0 by TCP.

use crate::tensor::Result;
use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long a rank waits for the others to come.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long it may take to say its number, once connected.
const GREETING: Duration = Duration::from_secs(5);

/// Which of how many a rank is.
pub struct Place {
    pub rank: usize,
    /// Among those of this machine.
    pub local: usize,
    pub world: usize,
    pub address: String,
}

impl Place {
    /// What RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT say; `None` without RANK.
    pub fn from_env() -> Result<Option<Self>> {
        let text = |name: &str| std::env::var(name).ok();
        let Some(rank) = text("RANK") else { return Ok(None) };
        let number = |name: &str, text: &str| -> Result<usize> {
            text.parse().map_err(|error| format!("{name}={text}: {error}").into())
        };
        let rank = number("RANK", &rank)?;
        let world = number("WORLD_SIZE", &text("WORLD_SIZE").ok_or("RANK needs WORLD_SIZE beside it")?)?;
        if rank >= world {
            return Err(format!("RANK={rank} must be below WORLD_SIZE={world}").into());
        }
        let local = text("LOCAL_RANK").map_or(Ok(rank), |local| number("LOCAL_RANK", &local))?;
        let host = text("MASTER_ADDR").unwrap_or_else(|| "127.0.0.1".to_owned());
        let port = text("MASTER_PORT").unwrap_or_else(|| "29500".to_owned());
        Ok(Some(Self { rank, local, world, address: format!("{host}:{port}") }))
    }
}

/// Connections: rank 0 has one to each other rank, in order; the others have one to rank 0.
pub struct Star {
    rank: usize,
    peers: RefCell<Vec<TcpStream>>,
}

impl Star {
    /// Waits until all are there. `listener`: rank 0's.
    pub fn join(place: &Place, listener: Option<TcpListener>) -> Result<Self> {
        let mut peers = Vec::new();
        if let Some(listener) = listener {
            let mut arrived: Vec<Option<TcpStream>> = (1..place.world).map(|_| None).collect();
            let begin = Instant::now();
            while arrived.iter().any(Option::is_none) {
                let mut peer = accept(&listener, place, begin)?;
                let mut rank = [0; 8];
                // A rank says its number at once. Others may connect, too: they are sent away, and not waited for.
                peer.set_read_timeout(Some(GREETING))?;
                if let Err(error) = peer.read_exact(&mut rank) {
                    eprintln!("a connection to {} is not a rank's: {error}", place.address);
                    continue;
                }
                peer.set_read_timeout(None)?;
                let rank = u64::from_le_bytes(rank);
                let seat = usize::try_from(rank).ok().and_then(|rank| arrived.get_mut(rank.checked_sub(1)?));
                match seat.filter(|seat| seat.is_none()) {
                    Some(seat) => *seat = Some(peer),
                    None => {
                        eprintln!("a second or unknown rank {rank} came to {}, and is sent away", place.address)
                    }
                }
            }
            peers.extend(arrived.into_iter().flatten());
        } else {
            let mut peer = connect(&place.address)?;
            peer.write_all(&(place.rank as u64).to_le_bytes())?;
            peers.push(peer);
        }
        for peer in &peers {
            peer.set_nodelay(true)?;
        }
        Ok(Self { rank: place.rank, peers: RefCell::new(peers) })
    }

    /// Rank 0's bytes, for all.
    pub fn broadcast(&self, bytes: &mut [u8]) -> Result<()> {
        let mut peers = self.peers.borrow_mut();
        if self.rank == 0 {
            peers.iter_mut().try_for_each(|peer| peer.write_all(bytes))?;
        } else {
            peers[0].read_exact(bytes)?;
        }
        Ok(())
    }

    /// The sum over all ranks, in their order, for all.
    pub fn sum(&self, values: &mut [f32]) -> Result<()> {
        let mut bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        if self.rank == 0 {
            let mut theirs = vec![0; bytes.len()];
            for peer in self.peers.borrow_mut().iter_mut() {
                peer.read_exact(&mut theirs)?;
                let words = theirs.as_chunks().0;
                values.iter_mut().zip(words).for_each(|(value, &word)| *value += f32::from_le_bytes(word));
            }
            bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        } else {
            self.peers.borrow_mut()[0].write_all(&bytes)?;
        }
        self.broadcast(&mut bytes)?;
        values.iter_mut().zip(bytes.as_chunks().0).for_each(|(value, &word)| *value = f32::from_le_bytes(word));
        Ok(())
    }
}

/// Another rank may not be there yet, or never come.
fn accept(listener: &TcpListener, place: &Place, begin: Instant) -> Result<TcpStream> {
    listener.set_nonblocking(true)?;
    while begin.elapsed() < PATIENCE {
        match listener.accept() {
            Ok((peer, _)) => {
                peer.set_nonblocking(false)?; // which it may have from the listener
                return Ok(peer);
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(5)),
                ErrorKind::ConnectionAborted | ErrorKind::Interrupted => {}
                _ => return Err(error.into()),
            },
        }
    }
    let (world, seconds) = (place.world, PATIENCE.as_secs());
    let text = format!(
        "not all of {world} ranks came to {} within {seconds} s: start one process for each of them",
        place.address
    );
    Err(text.into())
}

/// Rank 0 may not listen yet.
fn connect(address: &str) -> Result<TcpStream> {
    let begin = Instant::now();
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return Ok(stream),
            Err(error) if begin.elapsed() > PATIENCE => {
                return Err(format!("rank 0 does not answer at {address}: {error}").into());
            }
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}
