SELECT {columns} FROM ONLY {relation} WHERE {range} AND {filter}
