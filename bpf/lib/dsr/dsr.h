/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Direct server return (DSR): an endpoint on another node gets the client's own address,
 * and its node answers the client, without the node that received the connection.
 *
 *   receiving node   client -> service    becomes  client -> endpoint, with an option: a SYN, or
 *                                                  a datagram (dsr_names_service)
 *   endpoint's node  client -> endpoint   belongs to the flow  client -> service
 *                    endpoint -> client   becomes  service -> client
 *
 * The receiving node sees one direction. It cannot tell an honest client from a forged one, so its
 * flows stay unconfirmed (flow/unconfirmed.h), and a flood may delete them. The Service therefore
 * chooses by a table (SERVICE_MAGLEV): the connection's next packet leads to the same endpoint,
 * also at another node. The endpoint's node has the flow as if the packets had arrived there. It
 * sees both directions, and so the state, counters and events are there.
 *
 * Other folders call these:
 *
 *   receiving node   dsr_plan                  has a new flow DSR?              send.h
 *                    dsr_begin                 starts its state                 send.h
 *                    dsr_choose_encapsulation  finds out if packets need one    send.h
 *                    dsr_name_service          adds the option or headers       send.h
 *   endpoint's node  dsr_unwrap                removes these, answers probes    receive.h
 *                    dsr_find                  the flow of a packet without     receive.h
 *                    serve_dsr                 creates the flow                 receive.h
 *
 * The flow table also asks flow.h what a flow with DSR is, and what a packet means to it.
 */
#ifndef SPILLWAY_DSR_DSR_H
#define SPILLWAY_DSR_DSR_H

#include "receive.h"
#include "send.h"

#endif
