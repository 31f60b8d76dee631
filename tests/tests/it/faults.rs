//! Any process can die at any moment: what clients, operators and scrapers see of it.

mod chaos;
mod common;
mod disk;
mod load;
mod pressure;
mod several;
mod single;
mod watch;
