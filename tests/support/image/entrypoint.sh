#!/bin/sh
# Starts PostgreSQL in a container as the official image does: POSTGRES_USER, POSTGRES_PASSWORD and
# POSTGRES_DB make the superuser and the database at the first start, arguments go to the server.
set -eu
case "${1:-postgres}" in -*) set -- postgres "$@" ;; esac
if [ "$(id -u)" = 0 ]; then
  mkdir -p "$PGDATA" /var/run/postgresql
  chown -R postgres:postgres "$PGDATA" /var/run/postgresql
  chmod 700 "$PGDATA"
  exec setpriv --reuid postgres --regid postgres --clear-groups -- "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  user=${POSTGRES_USER:-postgres}
  database=${POSTGRES_DB:-$user}
  secret=$(mktemp)
  printf '%s\n' "${POSTGRES_PASSWORD:?has to be set}" >"$secret"
  initdb -D "$PGDATA" -U "$user" -E UTF8 --locale=C --pwfile="$secret" \
    --auth-local=trust --auth-host=scram-sha-256
  rm -f "$secret"
  echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
  echo "listen_addresses = '*'" >>"$PGDATA/postgresql.conf"
  # Until the database is there, only this script sees the server: it listens on a socket alone.
  pg_ctl -D "$PGDATA" -w -o "-c listen_addresses='' -k /var/run/postgresql" start
  [ "$database" = postgres ] || createdb -h /var/run/postgresql -U "$user" "$database"
  pg_ctl -D "$PGDATA" -m fast -w stop
fi
exec "$@"
