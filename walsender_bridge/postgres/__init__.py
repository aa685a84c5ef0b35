"""PostgreSQL's protocols, connections and naming rules, independent of the rest of Tuskline."""
