//! What holds for every draft worker, as one test per worker and check. Worker by worker, so that tests which run side
//! by side share their servers.

use crate::workers::{
    ADAPTIVE, DFLASH, DFLASH_FIXED, EAGLE, EAGLE_TREE, EAGLE3, EAGLE3_TREE, MIXED, MULTI_LAYER,
    MULTI_LAYER_PAGED, NEXTN, NEXTN_TREE, NGRAM, STANDALONE, STANDALONE_TREE,
};
use crate::{ends, lossless, numbers, opt_out, pool};

macro_rules! check_every {
    ($worker:ident: $($check:ident = $path:path;)+) => {$(
        #[test]
        fn $check() {
            $path(super::$worker);
        }
    )+};
}

macro_rules! every_worker {
    ($($name:ident = $worker:ident;)+) => {$(
        mod $name {
            use super::{ends, lossless, numbers, opt_out, pool};

            check_every! { $worker:
                options_give_the_plain_answer = lossless::options;
                a_forbidden_token_never_appears = lossless::forbidden_token;
                copies_are_the_requests_they_stand_for = lossless::copies;
                rows_of_a_changing_batch_are_as_alone = lossless::changing_batch;
                an_answer_ends_with_the_context = lossless::context_end;
                a_second_run_guesses_as_well = lossless::second_run;
                a_stop_token_ends_a_block = ends::stop_tokens;
                a_stop_string_ends_a_block = ends::stop_strings;
                the_first_of_several_ends_wins = ends::several_ends;
                a_pattern_ends_a_block = ends::stop_patterns;
                a_limit_is_exact = ends::limits;
                the_end_token_ends_a_block = ends::end_token;
                a_kept_stop_ends_the_text = ends::kept_stops;
                a_request_may_draft_less = opt_out::settings_in_a_batch;
                all_places_tell_the_same_numbers = numbers::agree;
                a_small_pool_changes_nothing = pool::small_pool;
                a_second_turn_finds_what_was_said = pool::second_turn;
                cut_off_requests_leave_a_sound_cache = pool::cut_off;
            }
        }
    )+};
}

every_worker! {
    adaptive = ADAPTIVE;
    dflash = DFLASH;
    dflash_fixed = DFLASH_FIXED;
    eagle = EAGLE;
    eagle_tree = EAGLE_TREE;
    eagle3 = EAGLE3;
    eagle3_tree = EAGLE3_TREE;
    mixed = MIXED;
    multi_layer = MULTI_LAYER;
    multi_layer_paged = MULTI_LAYER_PAGED;
    nextn = NEXTN;
    nextn_tree = NEXTN_TREE;
    ngram = NGRAM;
    standalone = STANDALONE;
    standalone_tree = STANDALONE_TREE;
}
