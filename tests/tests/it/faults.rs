//! Any process can die at any moment: what clients, operators and scrapers see of it.

mod chaos;
mod load;
mod single;
mod watch;
